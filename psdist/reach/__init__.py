"""Whether the hosts of a job still reach each other: *lines*, TCP connections over which nothing
goes, and what their end says.

Lives here: who may open a line, and how it ends (``greeting``), what is concluded from lines that
have ended (``watch``; pure), the end that listens (``hub``), and the ends that call (``member``).
The two kernels ask each other whether they are there; no thread of psdist has to run for that, so a
process that is stopped, computes, or sits in a debugger is never taken for one that is cut off.
What the job does about it is psdist.ranks.hosts's.

Must not import anything of psdist but errors. Needs neither MPI nor torch.
"""
