{{- define "torch-py-backend.selector" -}}
app.kubernetes.io/name: torch-py-backend
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "torch-py-backend.labels" -}}
{{ include "torch-py-backend.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
