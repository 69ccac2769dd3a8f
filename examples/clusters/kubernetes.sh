#!/bin/bash
# Kubernetes: a driver and four executors, each a pod. The image has Spark, Python, sparkring, the recipe and the two files
# of `sparkring package`. https://spark.apache.org/docs/latest/running-on-kubernetes.html
set -euo pipefail
# With decommissioning, Spark gives executors a preStop hook, so that a pod that is evicted says so: the ranks write a
# checkpoint within launch.grace_s, which is less than terminationGracePeriodSeconds of kubernetes_executor.yaml.
# Gang scheduling by YuniKorn, as the pod templates say it; without it, leave the three lines with yunikorn out.
# With GPUs, add spark.executor.resource.gpu.amount=1, spark.executor.resource.gpu.vendor=nvidia.com,
# spark.executor.resource.gpu.discoveryScript and spark.task.resource.gpu.amount=1.
exec spark-submit --master "k8s://${KUBERNETES_API:?https://host:port}" --deploy-mode cluster --name sparkring \
  --conf spark.kubernetes.container.image="${IMAGE:?registry/name:tag}" \
  --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
  --conf spark.kubernetes.driver.podTemplateFile=kubernetes_driver.yaml \
  --conf spark.kubernetes.executor.podTemplateFile=kubernetes_executor.yaml \
  --conf spark.kubernetes.scheduler.name=yunikorn \
  --conf spark.kubernetes.driver.annotation.yunikorn.apache.org/app-id="{{APP_ID}}" \
  --conf spark.kubernetes.executor.annotation.yunikorn.apache.org/app-id="{{APP_ID}}" \
  --conf spark.dynamicAllocation.enabled=false \
  --conf spark.executor.instances=4 \
  --conf spark.executor.cores=4 \
  --conf spark.executor.memory=4g \
  --conf spark.executor.memoryOverhead=8g \
  --conf spark.driver.memory=4g \
  --conf spark.decommission.enabled=true \
  --py-files local:///opt/sparkring/sparkring.zip \
  local:///opt/sparkring/sparkring_job.py run /opt/sparkring/recipe.yaml \
  launch.world=4 launch.cpus_per_rank=4 launch.grace_s=120 "$@"
