"""The type checker behind the shape annotations; an int is welcome where a float is, as in ``SamplingConfig(1)``."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
