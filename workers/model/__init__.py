"""The user's model and optimizer as a worker sees them.

``description`` says what must agree on all workers, ``flat`` lays parameters and gradients out as
the wire reads them, ``optimizer`` is what the user holds after ``job.prepare``, ``saving`` writes
the whole model. Knows no network: what is pushed when is psdist.workers.trainer's.
"""
