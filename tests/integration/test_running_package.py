"""The package on disk while it runs."""

from pathlib import Path

from notbefore import __version__
from notbefore.courier.package import RunningPackage


def test_the_same_version_installed_again_is_said_to_be_just_that(tmp_path: Path) -> None:
    place = tmp_path / "__init__.py"
    place.write_text("old")
    package = RunningPackage(place)
    assert not package.look()
    assert package.replaced == ""
    anew = tmp_path / "anew"
    anew.write_text("new")
    anew.rename(place)
    assert package.look()
    assert package.replaced == f"the package ({__version__}) was installed again after the start: restart the agent"
    assert not package.look()  # said once
