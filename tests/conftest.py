"""What every test module relies on: `strategies` is importable, and hypothesis knows no deadline."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    """A directory with an artifact for each of `artifacts.PROBLEMS`."""
    import artifacts as made

    directory = tmp_path_factory.mktemp("artifacts")
    made.export(directory, made.PROBLEMS.values())
    return directory
