#!/bin/bash
# Packs a Python with sparkring, and the recipe, into environment.tar.gz. Without pyspark, so that the cluster's own Spark
# is used; conda-pack brings the interpreter along, where venv-pack needs the same one on every host. Run it on the
# operating system of the cluster. https://conda.github.io/conda-pack/spark.html
set -euo pipefail
python=${1:-3.11} recipe=${2:-recipe.yaml}
conda create --yes --prefix ./environment "python=$python" conda-pack
./environment/bin/pip install "${SPARKRING:-sparkring}"
cp "$recipe" environment/recipe.yaml
./environment/bin/conda-pack --prefix ./environment --output environment.tar.gz
