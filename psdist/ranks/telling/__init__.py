"""What a rank knows of the run that people hear: how it stands, who died, the summary.

``standing`` is how the job stands, out of what workers report; ``status`` puts it into
``status.json``. ``summary`` makes ``summary.json``, with ``coding`` for what codecs have done,
``deaths`` for ranks that have died and ``modes`` for modes that have changed. Files and words are
psdist.report's. Nothing here may import the other modules of psdist.ranks.
"""
