"""Versions of Python and of the installed packages, without importing them."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "triton")


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, with the platform, and of the packages that compute; for bug reports."""
    python = f"{platform.python_version()} ({platform.system()} {platform.release()}, {platform.machine()})"
    return {"python": python, **{package: installed(package) or "not installed" for package in _PACKAGES}}
