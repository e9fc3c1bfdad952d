// The playground: a prompt goes to /v1 with a tenant's key, its answer is shown as it comes, then what was decided about it.

const ASKS = 20;
const EVERY_MS = 500;

// The texts of a stream of server-sent events, one by one.
async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const { content, reasoning, reasoning_content: thought } = event.choices?.[0]?.delta ?? {};
      if (content ?? reasoning ?? thought) yield content ?? reasoning ?? thought;
    }
  }
}

export function startPlayground() {
  const form = document.querySelector("[data-playground]");
  if (!form) return;
  const part = (name) => form.querySelector(`[data-${name}]`);
  const say = (text) => { part("said").textContent = text; };
  let [key, tenant, abort, id] = ["", "", null, ""];

  async function secret(given) {
    if (given.has("secret")) return given.get("secret").trim();
    if (key && tenant === given.get("tenant")) return key;
    const named = new URLSearchParams(["csrfmiddlewaretoken", "tenant"].map((name) => [name, given.get(name)]));
    const answer = await fetch(form.dataset.keyUrl, { method: "POST", body: named });
    if (!answer.ok) throw new Error("No key was made for this tenant.");
    [key, tenant] = [(await answer.json()).key, given.get("tenant")];
    return key;
  }

  async function ask(given) {
    const body = {
      model: given.get("model"), messages: [{ role: "user", content: given.get("prompt") }], stream: given.has("stream"),
      temperature: Number(given.get("temperature")), max_tokens: Number(given.get("max_tokens")),
    };
    const headers = { "Content-Type": "application/json", Authorization: `Bearer ${await secret(given)}` };
    if (given.get("class")) headers["X-SLO-Class"] = given.get("class");
    const began = performance.now();
    const answer = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: abort.signal });
    id = answer.headers.get("x-request-id");
    if (answer.status === 401) key = "";
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `Status ${answer.status}`);
    const after = (word) => say(`${word} after ${((performance.now() - began) / 1000).toFixed(2)} s, as this browser saw it`);
    if (!body.stream) part("answer").textContent = (await answer.json()).choices[0].message.content;
    else for await (const text of texts(answer.body)) {
      if (!part("answer").textContent) after("First token");
      part("answer").append(text);
    }
    if (!body.stream) after("Answered");
  }

  // What the ledger says, which has the request soon after its end.
  async function decided() {
    for (let asked = 0; asked < ASKS; asked += 1) {
      const answer = await fetch(`${form.dataset.decisionUrl}?id=${encodeURIComponent(id)}`);
      if (answer.status === 200) { part("decision").innerHTML = await answer.text(); return; }
      await new Promise((done) => { setTimeout(done, EVERY_MS); });
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (abort) return;
    [abort, id] = [new AbortController(), ""];
    part("answer").replaceChildren();
    [part("send").disabled, part("stop").hidden] = [true, false];
    say("Waits for the first token");
    try { await ask(new FormData(form)); } catch (error) { say(error.name === "AbortError" ? "Stopped" : error.message); }
    [part("send").disabled, part("stop").hidden, abort] = [false, true, null];
    if (id) decided();
  });
  part("stop").addEventListener("click", () => abort?.abort());
}
