// Swagger UI, which django-ninja ships, in the console's theme. "Try it out" calls the API in the name of this session.

const place = document.getElementById("swagger-ui");
const root = document.documentElement;

function follow() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.classList.toggle("dark-mode", dark);
}

document.addEventListener("themechange", follow);
follow();
window.SwaggerUIBundle({
  domNode: place,
  url: place.dataset.document,
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: -1,
  requestInterceptor: (request) => {
    request.headers["X-CSRFToken"] = place.dataset.csrf;
    return request;
  },
});
