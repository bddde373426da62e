"""The user's model and optimizer as a worker sees them.

``description`` says what must agree on all workers, ``flat`` lays parameters and gradients out as
the wire reads them, ``gradient_hooks`` copies gradients there as autograd finishes them, ``shadow``
is where replies land meanwhile, ``optimizer`` is what the user holds after ``job.prepare``,
``saving`` writes the whole model. ``refusals``, ``replaced_step`` and ``ties`` (with ``overlaps``)
refuse what servers cannot train. ``watch`` and ``samples`` find what a script writes to parameters,
and ``forward_hooks`` report passes of the model. This room sends nothing:
psdist.workers.trainer and psdist.workers.early.overlap push.
"""
