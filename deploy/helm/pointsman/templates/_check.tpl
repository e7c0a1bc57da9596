{{/* Refuses combinations of values that cannot work. The schema refuses single values. */}}
{{- define "pointsman.check" -}}
{{- $engines := .Values.engines -}}
{{- if and (gt (int .Values.router.replicas) 1) (eq .Values.redis.kind "none") -}}
{{- fail "router.replicas: two routers agree on the owner of each model through a Redis; set redis.kind" -}}
{{- end -}}
{{- if and (or .Values.redis.sentinelMaster .Values.redis.cluster) (ne .Values.redis.kind "external") -}}
{{- fail "redis.sentinelMaster, redis.cluster: only with redis.kind external" -}}
{{- end -}}
{{- if and (eq $engines.kind "existing") (eq (empty $engines.existing.addresses) (empty $engines.existing.service)) -}}
{{- fail "engines.existing: set either addresses or service" -}}
{{- end -}}
{{- if and (ne $engines.autoscaling.by "none") (ne $engines.kind "replicas") -}}
{{- fail (print "engines.autoscaling: only engines of kind replicas are scaled, not " $engines.kind) -}}
{{- end -}}
{{- if and (eq $engines.autoscaling.by "hpa") (contains "/" $engines.servedModelName) -}}
{{- fail "engines.servedModelName: a name with a slash cannot be a label's value, which the HPA needs; use keda" -}}
{{- end -}}
{{- if and $engines.kvTransfer.enabled (has $engines.kind (list "per-node" "existing")) -}}
{{- fail (print "engines.kvTransfer: not with engines of kind " $engines.kind) -}}
{{- end -}}
{{- if and .Values.gatewayApi.enabled (has $engines.kind (list "per-node" "existing")) -}}
{{- fail (print "gatewayApi: an InferencePool selects pods of engines, which kind " $engines.kind " has not") -}}
{{- end -}}
{{- if and .Values.ingress.enabled (empty .Values.ingress.host) -}}
{{- fail "ingress.host: set the name under which clients reach the API" -}}
{{- end -}}
{{- end }}
