"""How a command ended: its exit status, and words that it said."""


def assert_ended(done, status, *words, on="output"):
    """Assert the exit status of a command, and that one of its streams has these words."""
    assert done.exit_code == status, done.output
    said = getattr(done, on)
    for each in words:
        assert each in said, said
