"""Whether the committed gRPC stubs are what the .proto files say. With --write, make them so.

Run from anywhere: `python tests/check_stubs.py [--write]`. A .proto file has one owner package, which keeps the
stubs in its `pb/` folder and their import path as the file's name inside protobuf; so nothing is rewritten
after generation. The generator's version is pinned in pyproject.toml, as its output differs between versions.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
# Which package owns which .proto files; each .proto in proto/ must be listed once.
OWNERS = {"control_plane": ("admin.proto", "generation.proto"), "kvstore": ("kvstore.proto",)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="regenerate the committed stubs")
    write = parser.parse_args().write
    problems = [] if write else wrong_version()
    problems += orphans()
    for owner in OWNERS:
        with tempfile.TemporaryDirectory() as scratch:
            fresh = generate(owner, Path(scratch))
            committed = ROOT / owner / "pb"
            if write:
                replace(committed, fresh)
            else:
                problems += differences(owner, committed, fresh)
    for problem in problems:
        print(f"stubs: {problem}", file=sys.stderr)
    if problems:
        print("Mend with: python tests/check_stubs.py --write, then commit the pb/ folders", file=sys.stderr)
    return 1 if problems else 0


def wrong_version() -> list[str]:
    """The generator must be exactly the one that pyproject.toml pins."""
    installed = metadata.version("grpcio-tools")
    if f'"grpcio-tools=={installed}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        return []
    return [f"grpcio-tools {installed} is installed, pyproject.toml pins another: pip install -e '.[test]'"]


def orphans() -> list[str]:
    listed = {name for names in OWNERS.values() for name in names}
    found = {path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto")}
    wrong = [f"proto/{name} has no owner in tests/check_stubs.py" for name in sorted(found - listed)]
    return wrong + [f"proto/{name} is listed in tests/check_stubs.py but missing" for name in sorted(listed - found)]


def generate(owner: str, scratch: Path) -> Path:
    """Stubs of one owner, in a scratch folder; returns their pb/ folder."""
    well_known = str(resources.files("grpc_tools") / "_proto")
    out = [f"--{kind}={scratch}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    files = [f"{owner}/pb/{name}" for name in OWNERS[owner]]
    if protoc.main(["protoc", f"-I{owner}/pb={ROOT / 'proto'}", f"-I{well_known}", *out, *files]):
        raise SystemExit("stubs: protoc failed; its message is above")
    return scratch / owner / "pb"


def differences(owner: str, committed: Path, fresh: Path) -> list[str]:
    wanted = {path.name: path.read_text(encoding="utf-8") for path in fresh.iterdir()}
    found = {path.name: path.read_text(encoding="utf-8") for path in committed.glob("*_pb2*.py*")}
    missing = [f"{owner}/pb/{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    extra = [f"{owner}/pb/{name} belongs to no .proto file" for name in sorted(found.keys() - wanted.keys())]
    common = sorted(wanted.keys() & found.keys())
    return missing + extra + [f"{owner}/pb/{name} is out of date" for name in common if wanted[name] != found[name]]


def replace(committed: Path, fresh: Path) -> None:
    for old in committed.glob("*_pb2*.py*"):
        old.unlink()
    for path in fresh.iterdir():
        shutil.copy(path, committed / path.name)


if __name__ == "__main__":
    sys.exit(main())
