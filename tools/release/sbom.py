"""Writes what a release is made of, as CycloneDX 1.6 (JSON), one file a target; refuses licences that are not allowed.

Of the locks and packaging/licences.toml alone: nothing is fetched.

    usage: sbom.py [FOLDER]      where to; default: dist
"""

from __future__ import annotations

import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

from archives import ROOT, version_of
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from license_expression import get_spdx_licensing
from locks import TARGETS, Pin, Target, pins
from packageurl import PackageURL

LICENCES = ROOT / "packaging" / "licences.toml"
_NAME = "selfdraft"
_SPDX = get_spdx_licensing()


def refused(target: Target, locked: dict[str, Pin], licences: dict[str, Any]) -> list[str]:
    """What stands against a lock, a line each: packages of unknown licence, licences that are not allowed."""
    allowed = {*licences["allowed"], *licences["allowed-for"].get(target.name, [])}
    found: list[str] = []
    for name in locked:
        expression = licences["packages"].get(name)
        if expression is None:
            found.append(f"{target.name}: {name} has no licence in {LICENCES.name}: look it up, and add it")
        elif not _permits(_SPDX.parse(expression), allowed):
            found.append(f"{target.name}: {name} is under {expression}, which is not allowed")
    return found


def _permits(expression: Any, allowed: set[str]) -> bool:
    """Whether the allowed licences satisfy an expression: of an OR one side does, of an AND all have to."""
    operator = getattr(expression, "operator", "").strip()
    if operator in ("AND", "OR"):
        return {"AND": all, "OR": any}[operator](_permits(each, allowed) for each in expression.args)
    return str(expression) in allowed


def bill(target: Target, locked: dict[str, Pin], licences: dict[str, Any]) -> str:
    """The bill of materials of one target. The same lock gives the same text."""
    root = _component(_NAME, version_of(), "Apache-2.0", set(), ComponentType.APPLICATION)
    parts = {
        name: _component(name, pin.version, licences["packages"][name], pin.hashes) for name, pin in locked.items()
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{root.purl}?{target.name}&{target.lock.read_text(encoding='utf-8')}")
    bom = Bom(components=parts.values(), serial_number=serial, metadata=BomMetaData(component=root))
    bom.metadata.timestamp = None
    for name, component in {_NAME: root, **parts}.items():
        bom.register_dependency(component, [parts[each] for each, pin in locked.items() if name in pin.wanted_by])
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(
    name: str, version: str, licence: str, hashes: set[str], kind: ComponentType = ComponentType.LIBRARY
) -> Component:
    purl = PackageURL("pypi", name=name, version=version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{name}/{version}/"),
        comment="a digest for each file of the release",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in hashes],
    )
    return Component(
        name=name,
        version=version,
        type=kind,
        bom_ref=str(purl),
        purl=purl,
        licenses=[LicenseFactory().make_from_string(licence)],
        external_references=[files] if hashes else [],
    )


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    folder.mkdir(parents=True, exist_ok=True)
    licences = tomllib.loads(LICENCES.read_text(encoding="utf-8"))
    locked = {target: pins(target.lock.read_text(encoding="utf-8")) for target in TARGETS}
    against = [line for target, found in locked.items() for line in refused(target, found, licences)]
    if against:
        print("\n".join(against), file=sys.stderr)
        return 1
    for target, found in locked.items():
        text = bill(target, found, licences)
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        if error is not None:
            sys.exit(f"{target.name}: the bill of materials is not CycloneDX: {error}")
        path = folder / f"{_NAME}-{version_of()}-{target.name}.cdx.json"
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
