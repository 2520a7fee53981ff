from zero_sim.scenario.suggest import nearest


def test_nearest_name_comes_first():
    assert nearest("trch-ddp", ["zero_sim", "torch-ddp"]) == "torch-ddp, zero_sim"


def test_at_most_five_names_are_listed():
    assert nearest("ab", ["a", "b", "c", "d", "e", "f", "g"]) == "a, b, c, d, e or 2 more"
