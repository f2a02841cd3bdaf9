"""Ray's own modules warn of Pydantic's past while they are imported; that is not ours to mend."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
