"""Garbage collection: our processes skip objects of imports; foreign processes are unchanged."""

import subprocess
import sys

_STARTS = "import gc; usual = gc.get_threshold(); from zero_sim.host.garbage import *; "


def _says(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_objects_of_imports_are_frozen_and_others_collected():
    spared, is_usual = _says(
        f"{_STARTS}collect_seldom(); kept = [[] for _ in range(60_000)]; "
        "spare_imports(); print(gc.get_freeze_count() > 60_000, gc.get_threshold() == usual)"
    )
    assert (spared, is_usual) == ("True", "True")


def test_process_without_collect_seldom_is_unchanged():
    says = "print(gc.get_freeze_count(), *gc.get_threshold())"
    assert _says(f"{_STARTS}spare_imports(); {says}") == _says(f"import gc; {says}")


def test_settle_memory_freezes_live_objects_but_no_garbage():
    frozen, left = _says(
        f"{_STARTS}import weakref; collect_seldom(); settle_memory(); "
        "Circle = type('C', (), {}); "
        "circle = Circle(); circle.self = circle; seen = weakref.ref(circle); del circle; "
        "before = gc.get_freeze_count(); kept = [[] for _ in range(5000)]; settle_memory(); "
        "print(gc.get_freeze_count() - before > 5000, seen())"
    )
    assert (frozen, left) == ("True", "None")


def test_world_pool_does_not_change_a_foreign_processs_collector():
    assert _says(
        "import gc; from zero_sim.backends.worlds import WorldPool\n"
        "with WorldPool(): print(gc.get_freeze_count(), *gc.get_threshold())"
    ) == ["0", *_says("import gc; print(*gc.get_threshold())")]
