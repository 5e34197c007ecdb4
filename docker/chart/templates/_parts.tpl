{{/* What parts have in common. `part` is the values of one, `name` its name, `root` the chart's. */}}

{{- define "replay.selector" -}}
{app.kubernetes.io/name: replay-{{ .name }}, app.kubernetes.io/instance: {{ .root.Release.Name }}}
{{- end }}

{{- define "replay.labels" -}}
labels:
  app.kubernetes.io/name: replay-{{ .name }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  app.kubernetes.io/part-of: replay
{{- end }}

{{- define "replay.metadata" -}}
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  {{- include "replay.labels" . | nindent 2 }}
{{- end }}

{{/* The name of each server's pod, which stays when it moves. */}}
{{- define "replay.addresses" -}}
{{- $server := printf "%s-server" .Release.Name -}}
{{- range $i := until (int .Values.server.replicas) }}{{ if $i }},{{ end }}{{ $server }}-{{ $i }}.{{ $server }}:7400{{ end }}
{{- end }}

{{- define "replay.claim" -}}
accessModes: {{ toJson .accessModes }}
{{- with .class }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* The head of a pod: who it runs as, and where. */}}
{{- define "replay.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false   # a Service named vllm would set VLLM_PORT to an address
terminationGracePeriodSeconds: {{ .part.terminationGracePeriodSeconds }}
imagePullSecrets: {{ toJson .root.Values.images.pullSecrets }}
nodeSelector: {{ toJson (.part.nodeSelector | default dict) }}
tolerations: {{ toJson (.part.tolerations | default list) }}
securityContext: {{ toJson .root.Values.podSecurityContext }}
{{- end }}

{{/* A container up to its ports, probes and volumes; a client of `address`. */}}
{{- define "replay.container" -}}
{{- $images := .root.Values.images -}}
image: {{ with $images.registry }}{{ . }}/{{ end }}{{ .part.image }}
{{- if not (regexMatch "@|:[^/]+$" .part.image) }}:{{ $images.tag | default .root.Chart.AppVersion }}{{ .part.variant }}{{ end }}
imagePullPolicy: {{ $images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{ toJson .part.resources }}
env:
  - {name: REPLAY_ADDRESS, value: {{ .address | quote }}}
  {{- if .root.Values.access.enabled }}
  - {name: REPLAY_TLS_CA, value: /run/secrets/replay/ca.crt}
  - {name: REPLAY_TLS_SERVER_NAME, value: {{ .root.Values.access.serverName | default (printf "%s-server" .root.Release.Name) | quote }}}
  - {name: REPLAY_TOKEN_FILE, value: /run/secrets/replay/token}
  {{- end }}
  {{- if .part.heartbeatMinutes }}
  - {name: REPLAY_HEARTBEAT, value: /tmp/heartbeat}
  {{- end }}
  {{- range $key, $value := .part.env }}
  - {name: {{ $key }}, value: {{ $value | quote }}}
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shared, mountPath: /shared}
  {{- if .root.Values.access.enabled }}
  - {name: access, mountPath: /run/secrets/replay, readOnly: true}
  {{- end }}
{{- end }}

{{/* The volumes of every pod. Certificates and the token of `role` follow a change of their Secret, as the server's key and tokens do. */}}
{{- define "replay.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: shared
  {{- with .root.Values.sharedMemory }}
  hostPath: {path: {{ . }}, type: DirectoryOrCreate}
  {{- else }}
  emptyDir: {medium: Memory, sizeLimit: 512Mi}
  {{- end }}
{{- if .root.Values.access.enabled }}
{{- $server := eq .name "server" }}
- name: access
  projected:
    sources:
      - secret:
          name: {{ .root.Values.access.tls | default (printf "%s-tls" .root.Release.Name) }}
          items:
            - {key: ca.crt, path: ca.crt}
            {{- if $server }}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- end }}
      - secret:
          name: {{ .root.Values.access.tokens | default (printf "%s-tokens" .root.Release.Name) }}
          items:
            - {key: {{ .role }}, path: token}
            {{- if $server }}
            - {key: tokens, path: tokens}
            {{- end }}
{{- end }}
{{- end }}

{{/* A container of a client, which has the volume of the run, and may write there if it `writes`. */}}
{{- define "replay.client.container" -}}
{{- include "replay.container" (merge (dict "address" (include "replay.addresses" .root)) .) }}
  - {name: runs, mountPath: /runs, readOnly: {{ not .writes }}}
  - {name: cache, mountPath: /cache}
  - {name: shm, mountPath: /dev/shm}
{{- end }}

{{/* The pod of a client. `init` is the name, command and arguments of a container that runs before; `spec` more of the pod. */}}
{{- define "replay.client" -}}
metadata:
  annotations: {{ toJson (.part.annotations | default dict) }}
  {{- include "replay.labels" . | nindent 2 }}
spec:
  {{- include "replay.pod" . | nindent 2 }}
  {{- .spec | default "" | nindent 2 }}
  {{- with .init }}
  initContainers:
    - {{ toYaml . | nindent 6 | trim }}
      {{- include "replay.client.container" $ | nindent 6 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      args: {{ toJson .part.args }}
      {{- with .part.port }}
      ports: [{name: http, containerPort: {{ . }}}]
      {{- end }}
      {{- with .part.heartbeatMinutes }}
      livenessProbe:
        exec: {command: [sh, -c, 'test -n "$(find /tmp/heartbeat -mmin -{{ . }})"']}
        initialDelaySeconds: 600   # to load a model, and for vLLM to compile
        periodSeconds: 60
        timeoutSeconds: 30
      {{- end }}
      {{- include "replay.client.container" . | nindent 6 }}
  volumes:
    - name: runs
      persistentVolumeClaim: {claimName: {{ .root.Values.runs.existingClaim | default (printf "%s-runs" .root.Release.Name) }}}
    - name: cache
      emptyDir: {sizeLimit: 32Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- include "replay.volumes" . | nindent 4 }}
{{- end }}
