"""Print requirements.lock for the environment that runs this: ``make lock`` does it in a fresh one.

Walks the installed metadata from tinyllm's own declarations, so that the file says why each
package is there. torch's CUDA libraries are left out (see HEADER).
"""

from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# Every package that `make install` puts into .venv, pinned. Python 3.11 or newer, Linux.
# Written by `make lock`; change the ranges in setup.cfg, not this file.
#
# NVIDIA's CUDA libraries (nvidia-*, cuda-*) are not listed, so that the same file installs with
# a CPU build of torch. A CUDA build of torch names the ones that it needs in its own metadata.\
"""
EXTRAS = {  # the extras that the quickstart, the tests, the linters and the site need
    "data": "reading and tokenizing text (extra: data)",
    "report": "figures and evidence files (extra: report)",
    "slurm": "jobs on Slurm (extra: slurm)",
    "hf": "models of Hugging Face's (extra: hf)",
    "docs": "the documentation site (extra: docs)",
    "test": "tests (extra: test)",
    "lint": "linters and type stubs (extra: lint)",
}
BUILD = ["setuptools"]  # tinyllm itself is built without isolation


def needs(name: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """The direct requirements of an installed package that apply to this environment."""
    found = []
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}
        )
        if wanted and not requirement.name.startswith(("nvidia-", "cuda-")):
            found.append(requirement)
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """Canonical names of all packages that the requirements pull in, themselves included."""
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            queue += needs(requirement.name)
            if requirement.extras:
                queue += needs(requirement.name, key[1])
    return {name for name, _ in seen}


def pin(name: str) -> str:
    """``name==version``, without a local build tag such as ``+cpu``."""
    found = distribution(name)
    return f"{found.metadata['Name']}=={Version(found.version).public}"


def main() -> None:
    """Print the file: a group per extra, then what those packages need in turn."""
    core = needs("tinyllm")
    groups = {"core": core, "building tinyllm": [Requirement(name) for name in BUILD]}
    for extra, title in EXTRAS.items():
        names = {r.name for r in core}
        groups[title] = [r for r in needs("tinyllm", frozenset({extra})) if r.name not in names]
    direct = {canonicalize_name(r.name) for group in groups.values() for r in group}
    everything = closure([r for group in groups.values() for r in group])

    print(HEADER)
    for title, group in groups.items():
        print(f"\n# {title}")
        print("\n".join(sorted({pin(r.name) for r in group}, key=str.lower)))
    print("\n# what those need in turn")
    print("\n".join(sorted((pin(name) for name in everything - direct), key=str.lower)))


if __name__ == "__main__":
    main()
