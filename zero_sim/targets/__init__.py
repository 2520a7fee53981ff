"""Systems under test: the protocol, its adapter, declarations, and targets of libraries."""

from zero_sim.reference import LossRows
from zero_sim.scenario.derived import with_options
from zero_sim.targets.adapt import EngineAdapter, complete
from zero_sim.targets.bare_model import shapes_of
from zero_sim.targets.costs import TEXTBOOK, CostCase, Costs, costs_of
from zero_sim.targets.declared import (
    ADAMW_SETTINGS,
    EVERYTHING,
    OPTIMIZER_SETTINGS,
    PLAIN_MODELS,
    UNKNOWN,
    Capabilities,
    capabilities_of,
    check_supported,
    numerics_of,
    reduce_ops_of,
    refusals,
)
from zero_sim.targets.imported import check_target
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.options import Option, chosen_options, options_of
from zero_sim.targets.own_rule import rules_of
from zero_sim.targets.protocol import (
    CheckpointedEngine,
    CostedEngine,
    Engine,
    FullEngine,
    OwnedPart,
    PeakEngine,
    Place,
    Saving,
    Settings,
    StepResult,
    Target,
)
from zero_sim.targets.rank_local import Library, RankLocal, rank_local_of, why_missing
from zero_sim.targets.registry import (
    find_target,
    import_target,
    library_target_names,
    name_of,
    target_names,
)
from zero_sim.targets.torch.engines import (
    FlatBuffer,
    FlatShardEngine,
    WholeParamEngine,
    flat_parts,
)
from zero_sim.targets.torch.optim import (
    LearningRates,
    class_of,
    flat_state,
    group_index,
    own_settings,
    param_groups,
    plain_optimizer,
    settings_of,
)
from zero_sim.workloads import OwnModel

__all__ = [
    "ADAMW_SETTINGS",
    "EVERYTHING",
    "OPTIMIZER_SETTINGS",
    "PLAIN_MODELS",
    "TEXTBOOK",
    "UNKNOWN",
    "Capabilities",
    "CheckpointedEngine",
    "CostCase",
    "CostedEngine",
    "Costs",
    "Engine",
    "EngineAdapter",
    "FlatBuffer",
    "FlatShardEngine",
    "FullEngine",
    "LearningRates",
    "Library",
    "LossRows",
    "Numerics",
    "Option",
    "OwnModel",
    "OwnedPart",
    "PeakEngine",
    "Place",
    "RankLocal",
    "Saving",
    "Settings",
    "StepResult",
    "Target",
    "WholeParamEngine",
    "capabilities_of",
    "check_supported",
    "check_target",
    "chosen_options",
    "class_of",
    "complete",
    "costs_of",
    "find_target",
    "flat_parts",
    "flat_state",
    "group_index",
    "import_target",
    "library_target_names",
    "name_of",
    "numerics_of",
    "options_of",
    "own_settings",
    "param_groups",
    "plain_optimizer",
    "rank_local_of",
    "reduce_ops_of",
    "refusals",
    "rules_of",
    "settings_of",
    "shapes_of",
    "target_names",
    "why_missing",
    "with_options",
]
