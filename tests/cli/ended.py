"""Assertions on how a command ended: exit status and output."""


def assert_ended(done, status, *words, on="output"):
    """Assert the exit status of a command, and that one of its streams contains these words."""
    assert done.exit_code == status, done.output
    said = getattr(done, on)
    for each in words:
        assert each in said, said
