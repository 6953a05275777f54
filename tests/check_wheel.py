"""Builds a wheel, imports every room of it away from the checkout, and trains two steps with it.

python tests/check_wheel.py      (`make wheel-check`)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORT_ALL = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1])
names = [str(path.relative_to(site).with_suffix("")).replace("/", ".")
         for path in sorted((site / "logra_lightning").rglob("*.py"))]
names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
for name in names:
    if not name.endswith(("vllm_cpu_worker", "vllm_gpu_worker")):  # only vLLM imports them
        module = importlib.import_module(name)
        assert pathlib.Path(module.__file__).is_relative_to(site), module.__file__
print(len(names))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site, work = Path(folder) / "site", Path(folder) / "work"
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # its files would get into the wheel
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ".", cwd=ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        tops = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
        assert tops == {"logra_lightning"}, tops
        there = {path.relative_to(site / "logra_lightning") for path in site.rglob("*.py")}
        here = {p.relative_to(ROOT / "logra_lightning") for p in sources(ROOT / "logra_lightning")}
        assert there == here, there ^ here
        assert (site / "logra_lightning" / "py.typed").is_file()
        shutil.copytree(ROOT / "configs", work / "configs")
        shutil.copytree(ROOT / "examples" / "tiny_policy", work / "examples" / "tiny_policy")
        path = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        count = run(sys.executable, "-W", "ignore", "-c", IMPORT_ALL, str(site), cwd=work, **path)
        fit = [
            sys.executable,
            "-m",
            "logra_lightning",
            "fit",
            "--config",
            "configs/quickstart.yaml",
        ]
        fit += ["--model.engine=logra_lightning.engines.TorchEngine", "--trainer.max_steps=2"]
        fit += ["--validate_at_ends.enabled=false", "--trainer.enable_progress_bar=false"]
        output = run(*fit, cwd=work, **path)
        assert (work / "runs/quickstart/version_0/checkpoints/last.ckpt").is_file(), output
        print(f"{wheel.name}: {count.strip()} modules import, and two steps of the quick start run")


def sources(folder: Path) -> list[Path]:
    """All Python files, also behind the link of the callbacks."""
    return [*folder.rglob("*.py"), *(folder / "callbacks").glob("*.py")]


if __name__ == "__main__":
    main()
