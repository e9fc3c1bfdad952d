"""Environments of the clients, each with one of them and nothing of ours: `python -m tests.clients.environments`.

They stand in `.venv-clients/`, made once for each list of packages; `make clients` makes those that are missing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
PYTHON = {
    "openai": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "litellm": ("litellm==1.110.2",),
    "langchain": ("langchain==1.5.2", "langchain-openai==1.7.4"),
    "guidellm": ("guidellm==0.8.1",),
}
MORE = {"lm-eval": ("lm-eval[api]==0.4.13",), "aiperf": ("aiperf==0.13.0",)}
"""Those of tests that are for the night: they bring much."""
NODE = ("openai@6.49.0", "@anthropic-ai/sdk@1.14.0")


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def make(name: str, packages: tuple[str, ...]) -> None:
    """Make the environment *name* unless it stands already with the same *packages*."""
    folder, noted = FOLDER / name, FOLDER / name / "packages"
    if noted.exists() and noted.read_text().split() == list(packages):
        return
    print(f"Installing {' '.join(packages)} in {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if packages is NODE:
        folder.mkdir(parents=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, *packages], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "-q", "--python", python_of(name)]
        subprocess.run(
            [*(install if uv.exists() else [python_of(name), "-m", "pip", "install", "-q"]), *packages], check=True
        )
    noted.write_text("\n".join(packages))


def main() -> None:
    for name, packages in (PYTHON | (MORE if "all" in sys.argv[1:] else {})).items():
        make(name, packages)
    if shutil.which("npm"):
        make("node", NODE)
    else:
        print("There is no npm: the Node SDK is left out.")


if __name__ == "__main__":
    main()
