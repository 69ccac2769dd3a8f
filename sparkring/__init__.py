"""The one import name of the product: no folder of a user's project can shadow ours, nor ours theirs.

In a checkout `sparkring/conf`, `etl`, `training` and `pipelines` are links to the folders beside this one; the wheel
and the archive of `sparkring package` hold the files themselves.
"""
