"""A target with an off-by-one: it updates one element too many if a param is split."""

from zero_sim.targets import Capabilities
from zero_sim.targets.own import ZeroSimEngine, ZeroSimTarget


class Engine(ZeroSimEngine):
    def step(self, *, lr_factor):
        result = super().step(lr_factor=lr_factor)
        for part in self.parts():
            if part.place.start > 0:
                part.master[-1] += 1.0
        return result


class Broken:
    name = "broken"
    capabilities = None

    def build(self, module, *, scenario, group):
        return Engine(module, scenario=scenario, group=group)


class Raising(ZeroSimTarget):
    name = "raising"

    def build(self, module, *, scenario, group):
        raise RuntimeError("not today")


class Excluded(Broken):
    """A target whose capabilities allow no drawn case."""

    capabilities = Capabilities(only=(("world.strict", (False,)),))
