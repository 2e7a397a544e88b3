"""The wheel holds all that a user needs: it is built, installed into a clean environment, and generates text from another folder."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATE = """
import pathlib, sys
import jaxspec, pallas_kernels
print(pathlib.Path(jaxspec.__file__).parents[1], pathlib.Path(pallas_kernels.__file__).parents[1])
from jaxspec import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def pip(*arguments, environment=sys.executable):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment, *arguments]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built offline, by the build backend that is installed."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    [path] = folder.iterdir()
    return path


def test_the_wheel_holds_the_packages_and_the_bundled_models_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"jaxspec", "pallas_kernels"}
    held = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxspec" / "pocket").rglob("*") if path.suffix != ".pyc" and path.is_file()
    }
    assert "jaxspec/pocket/target/model.safetensors" in held and held <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"jaxspec/py.typed", "pallas_kernels/py.typed"} <= set(names)


@pytest.mark.slow  # above is what the wheel holds, and tests/test_cli.py generates in a process of its own
def test_an_installed_wheel_generates(wheel, tmp_path):
    """The environment has no package but jaxspec; the others are this environment's, whose own jaxspec is out of sight."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python, elsewhere = tmp_path / "venv" / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--quiet", "--no-deps", "--no-index", wheel, environment=python)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A folder on the path, not one of site's: what is installed in place there stays there.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    prompt = ["generate", "--drafter", "pocket-mtp", "--prompt", "def f():", "--max-tokens", "8", "--max-len", "64", "--k", "2"]
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quick
    command = [python, "-W", "error::DeprecationWarning:jaxspec", "-c", GENERATE, *prompt]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places, _, text = done.stdout.partition("\n")
    assert places == f"{packages} {packages}"
    assert text.startswith("def f():") and len(text.strip()) > len("def f():")
    assert (tmp_path / "venv" / "bin" / "jaxspec").is_file()
