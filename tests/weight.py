"""Print what the project weighs: `DJANGO_SETTINGS_MODULE=tests.settings python -m tests.weight`."""

import re
from collections.abc import Iterable
from pathlib import Path

import django

ROOT = Path(__file__).parent.parent
METHODS = {"get", "post", "put", "patch", "delete"}
PRODUCT = ("controlplane", "workers", "scheduling", "forecasting")
RECORD = re.compile(
    r"^@dataclass|^class \w+\((?:.*\b)?(?:Struct|NamedTuple|BaseModel|Schema|TypedDict)\b", re.MULTILINE
)
KERNEL = re.compile(r"^@compiled", re.MULTILINE)


def read(folder: str, pattern: str = "*.py") -> dict[Path, str]:
    """Return the text of each file of *folder*, without migrations and vendored files."""
    paths = sorted((ROOT / folder).rglob(pattern))
    return {path: path.read_text() for path in paths if not {"migrations", "vendor", "__pycache__"} & set(path.parts)}


def lines(texts: dict[Path, str]) -> int:
    return sum(text.count("\n") for text in texts.values())


def words(texts: Iterable[str]) -> int:
    return sum(len(text.split()) for text in texts)


def counts() -> dict[str, int]:
    """Return lines, files and things counted by what declares them. Needs Django to be set up."""
    from django.conf import settings
    from django.core.management import get_commands

    from controlplane.api.urls import api
    from controlplane.env import Environment
    from controlplane.tunable import Tunable
    from workers.celery import app

    pages = read("docs", "*.md")
    product = {path: text for folder in PRODUCT for path, text in read(folder).items()}
    everything = "\n".join(product.values())
    paths = api.get_openapi_schema()["paths"]
    operations = [method for path in paths if path.startswith("/api/") for method in paths[path] if method in METHODS]
    app.loader.import_default_modules()
    return {
        "controlplane and workers": lines(read("controlplane")) + lines(read("workers")),
        "scheduling": lines(read("scheduling")),
        "forecasting": lines(read("forecasting")),
        "product": lines(product),
        "tests": lines({path: text for path, text in read("tests").items() if "bench" not in path.parts}),
        "benchmarks": lines(read("tests/bench")),
        "templates and static": lines(read("templates", "*.html"))
        + sum(lines(read("static", pattern)) for pattern in ("*.js", "*.css")),
        "words of docs": words(text for path, text in pages.items() if "results" not in path.parts),
        "words of kept results, generated": words(text for path, text in pages.items() if "results" in path.parts),
        "files": len(product) + len(read("tests")),
        "records": len(RECORD.findall(everything)),
        "kernels": len(KERNEL.findall(everything)),
        "settings": len(Tunable.model_fields),
        "environment variables of their own": len(Environment.model_fields) - len(Tunable.model_fields),
        "REST operations": len(operations),
        "management commands": sum(app_name.startswith("controlplane") for app_name in get_commands().values()),
        "Celery tasks": sum(not name.startswith("celery.") for name in app.tasks),
        "beat entries": len(settings.CELERY_BEAT_SCHEDULE),
    }


if __name__ == "__main__":
    django.setup()
    for name, count in counts().items():
        print(f"{count:8,}  {name}")
