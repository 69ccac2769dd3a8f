"""Load models that were registered while our import names had no `sparkring.` before them.

Their MLmodel file names the loader `pipelines.serving`. The wheel installs this folder as `pipelines`, without an
`__init__.py`: Python prefers any regular package of that name, so a user's own `pipelines` is never shadowed.
"""

from sparkring.pipelines.serving import _load_pyfunc

__all__ = ["_load_pyfunc"]
