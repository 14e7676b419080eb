{{- /*
The pod template of a component. The argument is a dict:
  root, component           as for labels, and maybe pool or shard
  identity                  the component whose credential and certificate it has, if it is another one
  role                      the command of `refrain`
  settings                  resources, labels and so on of the component, which go over podDefaults
  configKey                 the entry of the ConfigMap
  ports                     names and numbers; the last one has the probes and the metrics
  data                      a name of the volume for /var/lib/refrain, if it is a claim
  grace                     seconds between the order to stop and the end
  preStopSeconds            seconds of them before the signal
  startupSeconds            seconds that the start may take
  env, initContainers       YAML of lists
  poolValues, shardNumber   what the configuration depends on
  asksCluster               whether it calls the API of the cluster, by an account of its own
*/}}
{{- define "refrain.pod" -}}
{{- $values := .root.Values -}}
{{- $_ := set . "settings" (fromJson (include "refrain.settings" .)) -}}
{{- $hasModels := and $values.models.volume (has .role (list "gateway" "worker" "up")) -}}
{{- $hasDownload := and $hasModels $values.models.download.image -}}
{{- $port := last .ports -}}
{{- $config := include "refrain.config" (dict "root" .root "role" .role "pool" .poolValues "shard" .shardNumber
  "isForTrainer" (eq .component "trainer")) -}}
{{- $probe := dict "role" .role "config" (fromJson $config) "configKey" .configKey "port" $port.name -}}
{{- $isAlive := include "refrain.probe" (merge (dict "alive" true) $probe) -}}
{{- /* A command takes longer than a page. */}}
{{- $patience := ternary 2 5 (contains "httpGet" $isAlive) -}}
{{- $isReady := include "refrain.probe" (merge (dict "alive" false) $probe) -}}
metadata:
  labels: {{- merge (fromYaml (include "refrain.selector" .)) .settings.podLabels | toYaml | nindent 4 }}
  annotations:
    refrain/config: {{ $config | sha256sum }}
    {{- if $values.metrics.annotations }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $port.number | quote }}
    {{- if not (contains "httpGet" $isAlive) }}
    prometheus.io/scheme: https
    {{- else if contains "HTTPS" $isAlive }}
    prometheus.io/scheme: https
    {{- end }}
    {{- end }}
    {{- with .settings.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- $account := printf "%s-%s" (include "refrain.fullname" .root) .component }}
  serviceAccountName: {{ $account }}{{ if and .asksCluster .pool }}-{{ .pool }}{{ end }}
  {{- include "refrain.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if or .settings.initContainers $hasDownload .initContainers }}
  initContainers:
    {{- with .settings.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if $hasDownload }}{{ include "refrain.download" . | nindent 4 }}{{ end }}
    {{- with .initContainers }}{{ . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "refrain.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [{{ .role }}, --config, /etc/refrain/config/{{ .configKey }}]
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- include "refrain.publicKey" .root | nindent 8 }}
        {{- with .env }}{{ . | nindent 8 }}{{ end }}
        {{- with .settings.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        {{- range .ports }}
        - {name: {{ .name }}, containerPort: {{ .number }}}
        {{- end }}
      {{- /* The listener is there. A worker listens once its engine has answered, a store once it has read its log. */}}
      startupProbe:
        {{- $isAlive | nindent 8 }}
        periodSeconds: 1
        timeoutSeconds: {{ $patience }}
        failureThreshold: {{ .startupSeconds }}
      {{- /*
      It can serve now. Otherwise requests go elsewhere, and nothing is restarted. A gateway is not ready while the
      scheduler is away. All gateways are so at once, so it stays in its Service for longer than a restart takes:
      requests wait there for gateway.scheduler_wait_ms. A pod that ends leaves its Service without a probe.
      */}}
      readinessProbe:
        {{- $isReady | nindent 8 }}
        periodSeconds: 2
        timeoutSeconds: {{ $patience }}
        failureThreshold: 7
      {{- /* It is not stuck. Whatever it waits for is no reason to restart it. */}}
      livenessProbe:
        {{- $isAlive | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      {{- if .preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .preStopSeconds }}}
      {{- end }}
      {{- include "refrain.security" . | nindent 6 }}
      resources: {{- toYaml .settings.resources | nindent 8 }}
      volumeMounts:
        {{- include "refrain.mounts" . | nindent 8 }}
    {{- with .settings.extraContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    - name: config
      configMap: {name: {{ include "refrain.fullname" .root }}}
    {{- if .asksCluster }}
    {{- /* What a cluster mounts into all containers of a pod by itself, for the one that needs it. */}}
    - name: account
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
    {{- if or .isEdge (fromJson $config).mesh.secret_file }}
    - name: keys
      secret:
        secretName: {{ include "refrain.keysSecret" .root }}
        defaultMode: 0440
        items:
          {{- if (fromJson $config).mesh.secret_file }}
          - {key: mesh-secret, path: mesh-secret}
          {{- end }}
          {{- if .isEdge }}
          - {key: namespace-signing-key, path: namespace-signing-key}
          {{- end }}
    {{- end }}
    {{- if $values.credentials.existingSecret }}
    - name: credential
      secret:
        secretName: {{ $values.credentials.existingSecret }}
        defaultMode: 0440
        items:
          - {key: {{ .identity | default .component }}{{ with .pool }}-{{ . }}{{ end }}, path: credential}
          {{- if and .isEdge $values.credentials.forOperators }}
          - {key: operator, path: operator}
          {{- end }}
    {{- if .engineNeedsKeys }}
    - name: engine-credential
      secret:
        secretName: {{ $values.credentials.existingSecret }}
        defaultMode: 0440
        items: [{key: engine-{{ .pool }}, path: credential}]
    {{- end }}
    {{- end }}
    {{- if $values.tls.mesh.enabled }}
    - name: mesh-tls
      secret: {secretName: {{ include "refrain.meshSecret" . }}, defaultMode: 0440}
    {{- end }}
    {{- if .isEdge }}
    {{- range $name := list "api" "operations" }}
    {{- $tls := get $values.tls $name }}
    {{- if include "refrain.hasCertificate" $tls }}
    - name: {{ $name }}-tls
      secret:
        secretName: {{ include "refrain.certificateSecret" (dict "root" $.root "name" $name "existing" $tls.existingSecret) }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- if eq $values.tenants.source "secret" }}
    - name: tenants
      secret: {secretName: {{ include "refrain.tenantsSecret" .root }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.redis.passwordSecret }}
    {{- if .name }}
    - name: redis
      secret:
        secretName: {{ .name }}
        defaultMode: 0440
        items: [{key: {{ .key }}, path: password}]
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if and .hasData (not .claims) }}
    - name: data
      emptyDir: {sizeLimit: 1Gi}
    {{- end }}
    {{- if $hasModels }}
    - name: models
      {{- toYaml $values.models.volume | nindent 6 }}
    {{- end }}
    {{- with .settings.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $spread := .settings.topologySpreadConstraints }}
  {{- if and $values.topologySpread (not $spread) }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  {{- $spread = append $spread (dict "topologyKey" . "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway") }}
  {{- end }}
  {{- end }}
  {{- with $spread }}
  {{- $own := dict "matchLabels" (fromYaml (include "refrain.selector" $)) }}
  topologySpreadConstraints:
    {{- range . }}
    - {{ set . "labelSelector" (.labelSelector | default $own) | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
{{- end }}

{{- /* The settings of a component, over those of all pods. */}}
{{- define "refrain.settings" -}}
{{- toJson (mergeOverwrite (deepCopy .root.Values.podDefaults) .settings) -}}
{{- end }}

{{- /* Where a pod runs, as whom, and who may fetch its images. The argument is that of a pod, with all its settings. */}}
{{- define "refrain.placement" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with concat .root.Values.image.pullSecrets .settings.imagePullSecrets | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- range $key := list "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $.settings $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The container that fills the volume of the models. */}}
{{- define "refrain.download" -}}
{{- $models := .root.Values.models -}}
- name: download
  image: {{ $models.download.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- range $key := list "command" "args" }}
  {{- with get $models.download $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  env:
    - {name: COMPONENT, value: {{ .component }}}
    - {name: POOL, value: {{ .pool | default "" | quote }}}
    {{- range list "HOME" "TMPDIR" }}
    - {name: {{ . }}, value: {{ $models.mountPath }}}
    {{- end }}
    {{- with $models.download.env }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- include "refrain.security" . | nindent 2 }}
  resources: {{- toYaml $models.download.resources | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: {{ $models.mountPath }}}
{{- end }}

{{- define "refrain.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* The key that verifies namespaces is public, and is in the Secret beside its private half. */}}
{{- define "refrain.publicKey" -}}
- name: REFRAIN_MESH__NAMESPACE_PUBLIC_KEY
  valueFrom: {secretKeyRef: {name: {{ include "refrain.keysSecret" . }}, key: namespace-public-key}}
{{- end }}

{{- define "refrain.mounts" -}}
{{- $values := .root.Values -}}
- {name: config, mountPath: /etc/refrain/config, readOnly: true}
{{- if .asksCluster }}
- {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{- if or .isEdge (not $values.credentials.existingSecret) $values.credentials.acceptsMeshSecret }}
- {name: keys, mountPath: /etc/refrain/keys, readOnly: true}
{{- end }}
{{- if $values.credentials.existingSecret }}
- {name: {{ .credential | default "credential" }}, mountPath: /etc/refrain/credential, readOnly: true}
{{- end }}
{{- if $values.tls.mesh.enabled }}
- {name: mesh-tls, mountPath: /etc/refrain/mesh-tls, readOnly: true}
{{- end }}
{{- if .isEdge }}
{{- range $name := list "api" "operations" }}
{{- if include "refrain.hasCertificate" (get $values.tls $name) }}
- {name: {{ $name }}-tls, mountPath: /etc/refrain/{{ $name }}-tls, readOnly: true}
{{- end }}
{{- end }}
{{- if eq $values.tenants.source "secret" }}
- {name: tenants, mountPath: /etc/refrain/tenants, readOnly: true}
{{- end }}
{{- if $values.redis.passwordSecret.name }}
- {name: redis, mountPath: /etc/refrain/redis, readOnly: true}
{{- end }}
{{- end }}
{{- if .hasData }}
- {name: data, mountPath: /var/lib/refrain}
{{- end }}
{{- if and $values.models.volume (has .role (list "gateway" "worker" "up")) }}
- {name: models, mountPath: {{ $values.models.mountPath }}, readOnly: true}
{{- end }}
{{- with .settings.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The claim of a StatefulSet. The argument is a dict with persistence. */}}
{{- define "refrain.claim" -}}
volumeClaimTemplates:
  - metadata: {name: data}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ .size }}}}
{{- end }}
