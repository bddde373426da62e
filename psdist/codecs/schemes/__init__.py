"""The codecs themselves, a module for each kind: ``casts``, ``quantized``, ``sign``, ``sparse`` and
``low_rank``; ``own`` has those of users, ``packed`` packs what another one gives, ``plain``
gives values as they are and ``raw`` is none. Imports psdist/codecs/base.py and blocks.py.
"""
