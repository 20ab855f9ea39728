{{- define "notbefore.selector" -}}
app.kubernetes.io/name: notbefore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "notbefore.labels" -}}
{{ include "notbefore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "notbefore.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* the names of the Secrets that `access: tls` uses */ -}}
{{- define "notbefore.certificate" -}}
{{ .Values.tls.certificate | default (printf "%s-tls" .Release.Name) }}
{{- end }}

{{- /* `true` if a sink is of the kind `kubernetes`, which needs a service account with rights; else nothing */ -}}
{{- define "notbefore.usesKubernetes" -}}
{{- range $sink := .Values.config.sinks }}
{{- if hasKey $sink "kubernetes" }}true{{ end }}
{{- end }}
{{- end }}

{{- /* the agent's configuration: the one in the values, with the section `server` for the value of `access` */ -}}
{{- define "notbefore.config" -}}
{{- if dig "server" "listen" "" .Values.config }}
{{- fail "config.server.listen: leave it out: `access` (node, tls or open) sets it" }}
{{- end }}
{{- $sinks := .Values.config.sinks | default dict }}
{{- range $number, $route := .Values.config.routes }}
{{- range $key := list "sinks" "fallback" }}
{{- $names := index $route $key | default list }}
{{- if kindIs "string" $names }}
{{- $names = list $names }}
{{- end }}
{{- range $name := $names }}
{{- if not (hasKey $sinks $name) }}
{{- fail (printf "config.routes[%d].%s: there is no sink %s under config.sinks" $number $key $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $server := dict }}
{{- if eq .Values.access "tls" }}
{{- $server = dict "server" (dict "listen" ":10169" "web_config_file" "/run/notbefore-web/web.yml") }}
{{- else if eq .Values.access "open" }}
{{- $server = dict "server" (dict "listen" ":10169" "insecure" true) }}
{{- end }}
{{- toYaml (merge $server .Values.config) }}
{{- end }}
