"""The tables of a model: found, described, and made a set of the job in ``job.prepare``.

plan = TablePlan.of(model, optimizers, config, weights)      # None without tables
plan.lines()                                   # equal on all workers or an error
tables = plan.make(config, group=..., peek=...) # follows the steps of optimizer plan.optimizer
loop.join(plan.setup(restore=""))              # after the sets of the dense parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psdist.checkpoint.index import difference_of_tables
from psdist.checkpoint.reading import Checkpoint
from psdist.config.modes import (
    lag_of_tables,
    modes_that_may_come,
    row_staleness,
)
from psdist.config.settings import RunConfig
from psdist.errors import ModelError, OptimizerRefusedError, UsageError
from psdist.protocol.control import Setup
from psdist.protocol.optimizers import canonical_name, pack_hyperparameters
from psdist.tables.optimizers import RowOptimizer, following
from psdist.tables.specs import TableSpec, TableSpecs, num_parts_for
from psdist.workers.group.channel import GroupChannel
from psdist.workers.tables.cache import RowCaches
from psdist.workers.tables.follower import Tables
from psdist.workers.tables.foresight import Foresight
from psdist.workers.tables.modules import Table

Group = dict[str, Any]
"""A parameter group of a torch optimizer."""


def tables_in(model: torch.nn.Module) -> dict[str, Table]:
    """Return the tables of a model by qualified name, which torch.compile does not change."""
    named = ((name.replace("_orig_mod.", ""), each) for name, each in model.named_modules())
    return {name or "table": each for name, each in named if isinstance(each, Table)}


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    modules: Sequence[Table]
    specs: TableSpecs
    groups: Sequence[Group]
    """By table: its parameter group, whose learning rate counts at each step."""
    followed: Mapping[str, Group]
    """The groups of tables that have no optimizer of their own, each by the name of a table."""
    served: str
    """Canonical name of the optimizer that has all tables."""
    optimizer: int
    """Its index."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: RunConfig,
        weights: Sequence[float],
    ) -> TablePlan | None:
        """Describe the tables; a table whose optimizer has a learning rate gets a parameter group
        with it. ``weights``: by server. Raises :class:`ModelError`, :class:`UsageError` and
        :class:`OptimizerRefusedError`."""
        named = tables_in(model)
        if not named:
            return None
        for name, each in named.items():
            if (dtype := each.rows_on_servers.dtype) != torch.float32:
                raise ModelError(
                    f"table {name} was converted to {dtype}; rows are float32: "
                    "convert the other modules alone, or use torch.autocast"
                )
        holders = {name: _holder(name, each, optimizers) for name, each in named.items()}
        index, *others = {index for index, _ in holders.values()}
        if others:
            raise ModelError(
                f"tables {', '.join(named)} are in several optimizers; rows of all tables are "
                "pushed together: put all tables into one optimizer"
            )
        served, made = optimizers[index], dict[tuple[int, float], Group]()
        groups, specs, followed = list[Group](), list[TableSpec](), dict[str, Group]()
        for name, module in named.items():
            _, group = holders[name]
            chosen = module.optimizer or following(
                canonical_name(type(served)), group, table=f"table {name}"
            )
            if module.optimizer is None and not any(each is group for each in followed.values()):
                followed[name] = group
            _require_mode(name, chosen, config)
            if chosen.lr is not None:
                group = _own_group(module, served, group, chosen.lr, made)
            groups.append(group)
            spec = replace(module.spec, name=name, seed=config.seed)
            specs.append(replace(spec, optimizer=chosen.name, arguments=chosen.arguments()))
        return cls(
            modules=list(named.values()),
            specs=TableSpecs(
                tables=tuple(specs),
                num_parts=num_parts_for(weights),
                max_rows=config.tables_max_rows,
                codec=config.tables_codec,
            ),
            groups=groups,
            followed=followed,
            served=canonical_name(type(served)),
            optimizer=index,
        )

    def lines(self) -> list[str]:
        """Return a line for each table, on which all workers must agree."""
        return [f"{each}" for each in self.specs.tables]

    def hyperparameters(self) -> bytes:
        """Return the learning rates of now, packed, a group for each table. Raises
        :class:`OptimizerRefusedError` if something else has changed."""
        for spec in self.specs.tables:
            if spec.name in self.followed:
                now = following(self.served, self.followed[spec.name], table=f"table {spec.name}")
                if now.arguments() != spec.arguments:
                    raise OptimizerRefusedError(
                        f"table {spec.name}: its parameter group has changed: {now.arguments()}, "
                        f"and {dict(spec.arguments)} at job.prepare; rows follow the lr alone. "
                        f"Give the table optimizer=psdist.{now.name}(...), or leave the group as "
                        "it is (torch's OneCycleLR: cycle_momentum=False)"
                    )
        return pack_hyperparameters([{"lr": each["lr"]} for each in self.groups])

    def refuse_others(self, checkpoint: Checkpoint, index: int) -> None:
        """Raise :class:`ModelError` unless these are the tables of set ``index`` there."""
        sets = checkpoint.index.sets
        there = sets[index].tables if index < len(sets) else ()
        if words := difference_of_tables(there, self.specs.tables):
            raise ModelError(
                f"the script's tables are not those of checkpoint {checkpoint.path}: {words}; "
                "resume with the script and settings that wrote it, or start in another run_dir"
            )

    def setup(self, *, restore: str) -> Setup:
        return Setup(
            partition=self.specs.partition().encode(),
            optimizer="rows",
            hyper=self.hyperparameters(),
            restore=restore,
            tables=self.specs.encode(),
        )

    def make(
        self,
        config: RunConfig,
        *,
        group: GroupChannel,
        peek: Callable[[int], Any],
        take_over: Callable[[], None],
        resume: Callable[[], None],
    ) -> Tables:
        """Return what follows the steps of the tables' optimizer; see :class:`Tables`."""
        return Tables(
            self.modules,
            hyperparameters=self.hyperparameters,
            foresight=Foresight(
                len(self.modules), peek=peek if config.tables_prefetch == "auto" else None
            ),
            group=group,
            take_over=take_over,
            resume=resume,
            lag=lag_of_tables(config),
        )


def caches_of(config: RunConfig, specs: TableSpecs) -> RowCaches | None:
    """Return the rows that a worker keeps; None if it keeps none."""
    if not (staleness := row_staleness(config)):
        return None
    return RowCaches(specs, num_rows=config.tables_cache, staleness=staleness)


def _holder(
    name: str, module: Table, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, Group]:
    """Return the optimizer, by index, and the group that hold a table."""
    found = [
        (index, group)
        for index, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        if any(each is module.rows_on_servers for each in group["params"])
    ]
    if len(found) == 1:
        return found[0]
    problem = f"is in {len(found)} optimizers" if found else "is in no optimizer"
    raise ModelError(
        f"table {name} {problem}; pass model.parameters() to exactly one that is prepared (to keep "
        f"the table as it is: {name}.rows_on_servers.requires_grad_(False))"
    )


def _require_mode(name: str, chosen: RowOptimizer, config: RunConfig) -> None:
    is_sync = config.tables_mode == "same" and modes_that_may_come(config) == ("sync",)
    if chosen.sync_only and not is_sync:
        raise OptimizerRefusedError(
            f"table {name}: psdist.{chosen.name} works in mode sync only: {chosen.sync_only}; use "
            "mode sync and tables.mode = same, or give the table another optimizer"
        )


def _own_group(
    module: Table,
    served: torch.optim.Optimizer,
    group: Group,
    lr: float,
    groups: dict[tuple[int, float], Group],
) -> Group:
    """Move the table into a group with this learning rate; return the group. ``groups``: those that
    were made, by the group that the tables were in."""
    if "initial_lr" in group:
        raise UsageError(
            f"table {module.spec.name}: its learning rate {lr:g} needs a parameter group of its "
            "own, and a scheduler exists already; make schedulers after job.prepare"
        )
    key, handle = (id(group), lr), module.rows_on_servers
    group["params"] = [each for each in group["params"] if each is not handle]
    if key in groups:
        groups[key]["params"].append(handle)
        return groups[key]
    options: Mapping[str, Any] = {k: v for k, v in group.items() if k not in ("params", "lr")}
    served.add_param_group({**options, "params": [handle], "lr": lr})
    groups[key] = served.param_groups[-1]
    if not group["params"]:
        served.param_groups[:] = [each for each in served.param_groups if each is not group]
    return groups[key]
