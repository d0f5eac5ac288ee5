"""The hooked run: whether this is one, and its type checker.

That is beartype, taking an int where a float is asked for, as Python's typing does.
"""

import os

from beartype import BeartypeConf, beartype

HOOKED = os.environ.get("FUNCMODELS_HOOK") == "1"

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
