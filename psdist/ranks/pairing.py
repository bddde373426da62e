"""Which server has whose second copy in this job, and whether that can be of use here.

pairs = pairs_of(config, roles, os.environ)      # None without replication = buddy

Nor does another one make a shard anew where a rank's death ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping

from psdist.config.settings import RunConfig
from psdist.errors import ConfigError
from psdist.install.launcher import survives_deaths
from psdist.protocol.roles import Place, Roles
from psdist.servers.protocol.replication.pairs import Pairs, pair


def pairs_of(config: RunConfig, roles: Roles, environment: Mapping[str, str]) -> Pairs | None:
    """Raises :class:`ConfigError` where a server's death would end the job all the same."""
    if config.on_server_death == "rebuild":
        _require_another_server(roles, environment)
    if config.replication == "none":
        return None
    num_servers = roles.num_servers
    pairs = pair(hosts=hosts_of(roles)[:num_servers], racks=racks_of(roles)[:num_servers])
    if not survives_deaths(environment):
        raise ConfigError(
            "replication = buddy needs an MPI that survives the death of a rank, which is Open MPI "
            "under mpirun --with-ft ulfm (psdist run -n passes it); under srun, and with MPICH, "
            "the launcher ends the job: set replication = none, and make checkpoints"
        )
    return pairs


def _require_another_server(roles: Roles, environment: Mapping[str, str]) -> None:
    """To make anew what a server had that has died."""
    if roles.num_servers < 2:
        raise ConfigError(
            "on_server_death = rebuild needs 2 servers or more, this run has 1: another one makes "
            "the dead one's shard anew; pass --servers 2, or --set on_server_death=end"
        )
    if not survives_deaths(environment):
        raise ConfigError(
            "on_server_death = rebuild needs an MPI that survives the death of a rank, which is "
            "Open MPI under mpirun --with-ft ulfm (psdist run -n passes it); under srun, and with "
            "MPICH, the launcher ends the job: set on_server_death = end, and make checkpoints"
        )


def hosts_of(roles: Roles) -> list[str]:
    """By server, and then by spare."""
    return [roles.places[rank].host for rank in (*roles.server_ranks, *roles.spare_ranks)]


def racks_of(roles: Roles) -> list[str]:
    """By server, and then by spare; "" where that is not known."""
    return [_rack(roles.places[rank]) for rank in (*roles.server_ranks, *roles.spare_ranks)]


def _rack(place: Place) -> str:
    """Its first switch, by its path; "" where that is not known."""
    address, _pattern = place.switches
    return address.rpartition(".")[0]
