"""Which server has whose second copy in this job, and whether that can be of use here.

pairs = pairs_of(config, roles, os.environ)      # None without replication = buddy
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
    if config.replication == "none":
        return None
    num_servers = roles.num_servers
    pairs = pair(hosts=hosts_of(roles)[:num_servers], racks=racks_of(roles)[:num_servers])
    if not survives_deaths(environment):
        raise ConfigError(
            "failures.replication = buddy needs an MPI that survives the death of a rank, which is "
            "Open MPI under mpirun --with-ft ulfm (psdist run -n passes it); under srun, and with "
            "MPICH, the launcher ends the job: set failures.replication = none, and make "
            "checkpoints"
        )
    return pairs


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
