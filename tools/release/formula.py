"""Writes the Homebrew formula, packaging/homebrew/selfdraft.rb, of the wheel in dist/ and the macOS lock.

Every dependency is a wheel: MLX is on the Python Package Index as nothing else, and seven others would need Rust.
The address of a file there follows from its BLAKE2b digest, so it is known before the wheel is uploaded.
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from archives import ROOT, version_of
from locks import TARGETS, pins, resolve
from packaging.tags import compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

__all__ = ["FORMULA", "Wheel", "address", "formula"]

FORMULA = ROOT / "packaging" / "homebrew" / "selfdraft.rb"
PYTHON = "3.13"

_VERSION = tuple(map(int, PYTHON.split(".")))
_MACOS = list(mac_platforms((14, 0), "arm64"))  # sonoma, as the formula asks for
_TAGS = [
    *cpython_tags(_VERSION, platforms=_MACOS),
    *compatible_tags(_VERSION, f"cp{PYTHON.replace('.', '')}", _MACOS),
]
_HOST = "https://files.pythonhosted.org/packages"
_TEXT = """\
# Written by tools/release/formula.py of the wheel and packaging/locks/macos-arm64.txt: change those.
class Selfdraft < Formula
  include Language::Python::Virtualenv

  desc "Speculative decoding with a language model's own MTP head"
  homepage "https://pypi.org/project/selfdraft/"
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

  # The extensions in wheels have names under @rpath, and no room for longer ones.
  preserve_rpath

{resources}

  def install
    virtualenv_create(libexec, "python{python}", system_site_packages: false)
    resources.each {{ |wheel| cp wheel.cached_download, buildpath/File.basename(wheel.url) }}
    system "python{python}", "-m", "pip", "--python=#{{libexec}}/bin/python", "install",
           "--no-deps", "--no-index", "--no-compile", *buildpath.glob("*.whl")
    bin.install_symlink libexec/"bin/selfdraft"
    man1.install_symlink libexec/"share/man/man1/selfdraft.1"
    bash_completion.install_symlink libexec/"share/bash-completion/completions/selfdraft"
    zsh_completion.install_symlink libexec/"share/zsh/site-functions/_selfdraft"
    fish_completion.install_symlink libexec/"share/fish/vendor_completions.d/selfdraft.fish"
  end

  service do
    run [opt_bin/"selfdraft", "serve"]
    keep_alive crashed: true
    log_path var/"log/selfdraft.log"
    error_log_path var/"log/selfdraft.log"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/selfdraft --version")
    assert_match "reference", shell_output("#{{bin}}/selfdraft inspect reference")
    assert_match "--max-tokens", shell_output("#{{bin}}/selfdraft completions bash")
  end
end
"""
_RESOURCE = """\
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end"""


@dataclass(frozen=True)
class Wheel:
    """A file on the index. `sha256` is in hexadecimal digits."""

    name: str
    url: str
    sha256: str


def address(file: Path) -> str:
    """Where a file lies, or will lie, on the index: under its 256-bit BLAKE2b digest."""
    digest = hashlib.blake2b(file.read_bytes(), digest_size=32).hexdigest()
    return f"{_HOST}/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{file.name}"


def formula(wheel: Path, dependencies: list[Wheel]) -> str:
    """The formula's text for a wheel of this package."""
    return _TEXT.format(
        url=address(wheel),
        version=version_of(),
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        python=PYTHON,
        resources="\n\n".join(_RESOURCE.format(**vars(each)) for each in dependencies),
    )


def _dependencies() -> list[Wheel]:
    """The wheel of each dependency for the Python of the formula, at the versions and with the hashes of the lock."""
    (target,) = [each for each in TARGETS if each.name == "macos-arm64"]
    locked = pins(target.lock.read_text(encoding="utf-8"))
    text = resolve(target, "--format", "pylock.toml", "--constraints", str(target.lock), python=PYTHON)
    found: list[Wheel] = []
    for package in tomllib.loads(text)["packages"]:
        name = package["name"]
        file = min(package["wheels"], key=lambda each: _rank(PurePosixPath(each["url"]).name))
        pin, sha256 = locked.get(name), file["hashes"]["sha256"]
        if pin is None or package["version"] != pin.version or sha256 not in pin.hashes:
            sys.exit(f"{name} {package['version']} is not what {target.lock.name} pins: run `make locks`")
        found.append(Wheel(name, file["url"], sha256))
    return found


def _rank(wheel: str) -> int:
    """Place of a wheel in the order in which pip prefers them; lower is better."""
    _, _, _, tags = parse_wheel_filename(wheel)
    return min(_TAGS.index(tag) for tag in tags if tag in _TAGS)


def main() -> int:
    wheels = list((ROOT / "dist").glob(f"selfdraft-{version_of()}-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"there is no wheel of {version_of()} in dist/: run `make dist`")
    FORMULA.parent.mkdir(parents=True, exist_ok=True)
    FORMULA.write_text(formula(wheels[0], _dependencies()), encoding="utf-8")
    print(FORMULA.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
