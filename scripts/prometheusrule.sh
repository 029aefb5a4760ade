#!/bin/sh
# Makes the Prometheus operator's PrometheusRule from a file of rules: standard input to standard output.
set -eu
cat <<END
# make manifests has made this from examples/monitoring/rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: coredns-nanny
spec:
END
sed 's/^./  &/'
