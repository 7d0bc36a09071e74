"""How property tests draw their examples: anew each time, and in the gate (`make test`) the same ones each time.

No example has a deadline: a busy machine is no fault.
"""

from hypothesis import settings

settings.register_profile("anew", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("anew")
