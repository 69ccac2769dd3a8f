#!/bin/bash
# YARN: four executors for four ranks, and none that comes or goes. First `sparkring package` and environment.sh.
# https://spark.apache.org/docs/latest/running-on-yarn.html
set -euo pipefail
# Ranks are processes beside the executor's JVM: memoryOverhead holds them, and YARN kills a container that is over it.
# launch.cpus_per_rank is for Spark 4; before, set spark.task.cpus=4 in its place. With GPUs, add
# spark.executor.resource.gpu.amount=1, spark.task.resource.gpu.amount=1 and spark.executor.resource.gpu.discoveryScript.
exec spark-submit --master yarn --deploy-mode client \
  --archives environment.tar.gz#environment \
  --conf spark.pyspark.python=./environment/bin/python \
  --conf spark.pyspark.driver.python="$PWD/environment/bin/python" \
  --conf spark.dynamicAllocation.enabled=false \
  --conf spark.executor.instances=4 \
  --conf spark.executor.cores=4 \
  --conf spark.executor.memory=4g \
  --conf spark.executor.memoryOverhead=8g \
  --conf spark.decommission.enabled=true \
  --py-files dist/sparkring.zip \
  dist/sparkring_job.py run recipe.yaml launch.world=4 launch.cpus_per_rank=4 "$@"
