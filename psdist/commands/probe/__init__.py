"""``psdist probe``: how fast the network of a job is, measured and written to ``network.json``.

    srun --mpi=pmix -N 4 --ntasks-per-node=2 psdist probe

Reading order: ``command`` (from start to file), ``schedule`` (who exchanges with whom, when),
``measuring`` (all steps, GPUs), ``exchange`` (one pair, its speed), ``report``
(links out of pairs, the table). ``comparison`` is ``--compare``, which measures nothing.
"""

from psdist.commands.probe.command import probe

__all__ = ["probe"]
