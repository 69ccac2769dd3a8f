"""What does not go together in a recipe, as lists of `Rule`s (`rule`), one list per stage.

| stage | facts | list | checked |
|---|---|---|---|
| recipe | the configuration | `RECIPE` in `recipe` (with `promotion`) | when a recipe is loaded |
| training | the names that its dataset will have | `FORESEEN` in `foreseen` | before tables are read |
| dataset | the manifest | `DECLARED` and `DATASET` in `dataset` | before and after it is built |
| cluster | ranks on each axis, device | `LAYOUT` in `strategies` | by the driver, and by each rank |

What needs more than this package is a list where that is: `TABLES`, `CODE` and `CLUSTER` (slots and GPUs) in
`pipelines/validate`, `TRIAL` and `SWEEP` with their commands. A rule within one block is a validator of its class in
conf/blocks.
"""
