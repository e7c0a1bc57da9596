{{/* Labels of every object. Pods have only the labels that selectors use, so that a new version of the chart rolls no pods. */}}
{{- define "pointsman.labels" -}}
app.kubernetes.io/part-of: pointsman
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The image of a part: (list . "router"). */}}
{{- define "pointsman.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $part := index . 1 -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end }}pointsman-{{ $part }}:{{ index $images.tags $part | default $images.tag | default (index . 0).Chart.AppVersion }}
{{- with index $images.digests $part }}@{{ . }}{{ end }}
{{- end }}

{{/* Where a pod may run: (list . VALUES), VALUES with nodeSelector and tolerations. */}}
{{- define "pointsman.placement" -}}
{{- with (index . 0).Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with (index . 1).nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index . 1).tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of pods of Pointsman's own images. */}}
{{- define "pointsman.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pointsman.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pointsman.tlsEnv" -}}
{{- with .Values.tls }}
{{- if .enabled }}
- {name: POINTSMAN_TLS_CERT, value: /run/tls/{{ .cert }}}
- {name: POINTSMAN_TLS_KEY, value: /run/tls/{{ .key }}}
- {name: POINTSMAN_TLS_CA, value: /run/tls/{{ .ca }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "pointsman.tlsMount" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /run/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* The volume of a Secret with a certificate: (list . "tls-router"). */}}
{{- define "pointsman.tlsVolume" -}}
{{- if (index . 0).Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ index . 1 }}}
{{- end }}
{{- end }}

{{/* What all agents have, in an engine's pod, on a node, or for existing engines. */}}
{{- define "pointsman.agentProbes" -}}
readinessProbe:
  httpGet: {path: /health, port: agent-metrics}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  tcpSocket: {port: agent-metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "pointsman.agentMounts" -}}
- {name: tokens, mountPath: /run/secrets/pointsman, readOnly: true}
# The agent's copy of its engines' caches outlives a restart of its container, not its pod.
- {name: agent-state, mountPath: /var/lib/pointsman}
- {name: tmp, mountPath: /tmp}
{{- include "pointsman.tlsMount" . }}
{{- end }}

{{- define "pointsman.agentVolumes" -}}
- name: tokens
  secret:
    secretName: {{ .Values.secrets.tokens }}
    items:
      - {key: agent, path: agent}
- name: agent-state
  emptyDir: {sizeLimit: 1Gi}
- name: tmp
  emptyDir: {sizeLimit: 100Mi}
{{- include "pointsman.tlsVolume" (list . .Values.secrets.tlsAgent) }}
{{- end }}

{{/* What engines have in all kinds of deployments that start them: the first flags, environment, probes, resources. */}}
{{- define "pointsman.engineFlags" -}}
- $(MODEL)
- --served-model-name=$(SERVED_MODEL_NAME)
- --port=8000
- --tensor-parallel-size=$(TENSOR_PARALLEL_SIZE)
- --max-model-len=$(MAX_MODEL_LEN)
- --gpu-memory-utilization=$(GPU_MEMORY_UTILIZATION)
- --enable-prefix-caching
{{- end }}

{{- define "pointsman.engineFlagsEnd" -}}
# The engine's count of a request's cached tokens, with which the router checks its predictions.
- --enable-prompt-tokens-details
# Long prefills are divided so that short requests run between their parts.
- --long-prefill-token-threshold=$(LONG_PREFILL_TOKEN_THRESHOLD)
# Maximum time, in s, in which an engine completes its running requests after SIGTERM; it accepts no new ones. The same as that of
# gateways (POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S).
- --shutdown-timeout=3600
# All other flags: engines.flags.
- --config
- /etc/pointsman/engine.yaml
{{- end }}

{{- define "pointsman.engineEnv" -}}
- {name: HF_HOME, value: /models}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{ include "pointsman.huggingFace" . }}
{{- end }}

{{/* Only for models that need a token. */}}
{{- define "pointsman.huggingFace" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.huggingFace }}, key: token, optional: true}
{{- end }}

{{/* (list VALUES-OF-ENGINES): probes, resources and security of the container vllm. */}}
{{- define "pointsman.engineTail" -}}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div .startupSeconds 5 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- $devices := dict "nvidia.com/gpu" (include "pointsman.gpus" .) }}
{{- if and .kvTransfer.enabled (eq .kvTransfer.protocol "rdma") }}
{{- $_ := set $devices .kvTransfer.rdmaResource "1" }}
{{- end }}
resources:
  requests: {{- toYaml (merge (dict) $devices (.resources.requests | default dict)) | nindent 4 }}
  limits: {{- toYaml (merge (dict) $devices (.resources.limits | default dict)) | nindent 4 }}
securityContext:
  # No readOnlyRootFilesystem, because vLLM stores its compiled kernels in its home.
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "pointsman.gpus" -}}
{{- $gpus := int .tensorParallelSize -}}
{{- range list "data-parallel-size" "pipeline-parallel-size" -}}
{{- $gpus = mul $gpus (index $.flags . | default 1 | int) -}}
{{- end -}}
{{- $gpus -}}
{{- end }}

{{- define "pointsman.engineSecurity" -}}
runAsNonRoot: true
# The user `vllm` of the engine image. An agent in its pod runs as the same user, since otherwise it cannot open the engine's sockets.
runAsUser: 2000
runAsGroup: 0
fsGroup: 2000
seccompProfile: {type: RuntimeDefault}
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{/* (list VALUES-OF-ENGINES): a claim for the model. */}}
{{- define "pointsman.modelClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .storage.className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .storage.size }}}}
{{- end }}

{{/*
The sets of engines as a JSON list of values of engines, each with `suffix` (of names), `role` (a label; empty: none) and `kvRole`.
No sets for engines that exist already.
*/}}
{{- define "pointsman.engineSets" -}}
{{- $engines := omit .Values.engines "prefill" "decode" "existing" "autoscaling" -}}
{{- $sets := list -}}
{{- if eq $engines.kind "prefill-decode" -}}
{{- range $role, $kvRole := dict "decode" "kv_consumer" "prefill" "kv_producer" -}}
{{- $own := dict "suffix" (print "-" $role) "role" $role "kvRole" $kvRole "kvTransfer" (dict "enabled" true) -}}
{{- $sets = append $sets (mergeOverwrite (deepCopy $engines) (deepCopy (index $.Values.engines $role)) $own) -}}
{{- end -}}
{{- else if ne $engines.kind "existing" -}}
{{- $sets = list (merge (dict "suffix" "" "role" "" "kvRole" "kv_both") $engines) -}}
{{- end -}}
{{- toJson $sets -}}
{{- end }}

{{/* The addresses of all routers. */}}
{{- define "pointsman.routers" -}}
{{- $addresses := list -}}
{{- range until (int .Values.router.replicas) -}}
{{- $addresses = append $addresses (printf "router-%d:50051" .) -}}
{{- end -}}
{{- join " " $addresses -}}
{{- end }}

{{/* The data of ConfigMaps. Pods have their hash as an annotation, so that a changed setting rolls those that use it. */}}
{{- define "pointsman.routerSettings" -}}
{{- $settings := dict
  "POINTSMAN_TOKEN_DIR" "/run/secrets/pointsman"
  "POINTSMAN_ROUTER_LISTEN" "0.0.0.0:50051"
  "POINTSMAN_ROUTER_METRICS_LISTEN" "0.0.0.0:9100" -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.router.settings)) -}}
{{- end }}

{{- define "pointsman.gatewaySettings" -}}
{{- $settings := dict
  "POINTSMAN_TOKEN_DIR" "/run/secrets/pointsman"
  "POINTSMAN_GATEWAY_LISTEN" "0.0.0.0:8080"
  "POINTSMAN_GATEWAY_ROUTERS" (include "pointsman.routers" .)
  "POINTSMAN_GATEWAY_API_KEYS_FILE" "/run/secrets/clients/api-keys"
  "POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S" "3600" -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.gateway.settings)) -}}
{{- end }}

{{- define "pointsman.agentSettings" -}}
{{- $settings := dict
  "POINTSMAN_TOKEN_DIR" "/run/secrets/pointsman"
  "POINTSMAN_AGENT_ROUTERS" (include "pointsman.routers" .)
  "POINTSMAN_AGENT_STATE_DIR" "/var/lib/pointsman/agent"
  "POINTSMAN_AGENT_METRICS_LISTEN" "0.0.0.0:9101" -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.agent.settings)) -}}
{{- end }}

{{/* Of existing engines. */}}
{{- define "pointsman.existingEngines" -}}
{{- with .Values.engines.existing -}}
{{- if .service }}
POINTSMAN_AGENT_ENGINE_SERVICES: {{ .service | quote }}
{{- else }}
POINTSMAN_AGENT_ENGINES: {{ join " " .addresses | quote }}
{{- end }}
POINTSMAN_AGENT_STEP_LOADS_LISTEN: tcp://0.0.0.0:9108
{{- end }}
{{- end }}

{{/* Of a set of engines. */}}
{{- define "pointsman.engineSettings" -}}
{{- $settings := dict
  "MODEL" .model
  "SERVED_MODEL_NAME" .servedModelName
  "MAX_MODEL_LEN" (int64 .maxModelLen | toString)
  "TENSOR_PARALLEL_SIZE" (int64 .tensorParallelSize | toString)
  "GPU_MEMORY_UTILIZATION" (toString .gpuMemoryUtilization)
  "LONG_PREFILL_TOKEN_THRESHOLD" (int64 .longPrefillTokenThreshold | toString) -}}
{{- if .kvTransfer.enabled -}}
{{- $settings = mergeOverwrite $settings (dict "KV_ROLE" .kvRole "KV_PROTOCOL" .kvTransfer.protocol) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .settings)) -}}
{{- end }}

{{/* Labels of the pods of a set of engines: a Service and a StatefulSet must not select the other role's pods. */}}
{{- define "pointsman.engineSelector" -}}
app.kubernetes.io/name: vllm
{{- with .role }}
pointsman/kv-role: {{ . }}
{{- end }}
{{- end }}

{{/* The behavior of the autoscaler of engines. */}}
{{- define "pointsman.engineScaling" -}}
# Without delay, up to twice the number of instances, because an engine takes minutes to start.
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 100, periodSeconds: 60}]
# One at a time, and only after 15 minutes without need, because the prefix cache of a removed instance is lost. The instance first
# completes its running requests (terminationGracePeriodSeconds).
scaleDown:
  stabilizationWindowSeconds: 900
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end }}

{{/* Paths of the APIs. /metrics, /health and similar paths stay inside the cluster. */}}
{{- define "pointsman.paths" -}}
[/v1, /v2, /rerank, /score, /pooling, /classify, /tokenize, /detokenize]
{{- end }}
