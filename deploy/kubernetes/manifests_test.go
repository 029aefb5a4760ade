// Package kubernetes checks the manifests. It is a module of its own, as only this needs Kubernetes's types.
package kubernetes

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// build is `kubectl kustomize dir`: its objects by kind, decoded as the API server does it, so that an unknown field fails.
func build(t *testing.T, dir string) map[string]any {
	t.Helper()
	return buildIn(t, filesys.MakeFsOnDisk(), dir)
}

func buildIn(t *testing.T, fs filesys.FileSystem, dir string) map[string]any {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(fs, dir)
	if err != nil {
		t.Fatal(err)
	}
	objects := map[string]any{}
	for _, r := range built.Resources() {
		text, err := r.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		types := map[string]any{
			"apps/v1 DaemonSet":                               &appsv1.DaemonSet{},
			"apps/v1 Deployment":                              &appsv1.Deployment{},
			"monitoring.coreos.com/v1 PodMonitor":             &monitoringv1.PodMonitor{},
			"monitoring.coreos.com/v1 PrometheusRule":         &monitoringv1.PrometheusRule{},
			"policy/v1 PodDisruptionBudget":                   &policyv1.PodDisruptionBudget{},
			"rbac.authorization.k8s.io/v1 ClusterRole":        &rbacv1.ClusterRole{},
			"rbac.authorization.k8s.io/v1 ClusterRoleBinding": &rbacv1.ClusterRoleBinding{},
			"v1 ConfigMap":                                    &corev1.ConfigMap{},
			"v1 Service":                                      &corev1.Service{},
			"v1 ServiceAccount":                               &corev1.ServiceAccount{},
		}
		object, ok := types[r.GetApiVersion()+" "+r.GetKind()]
		if !ok || objects[r.GetKind()] != nil {
			t.Fatalf("%s %s isn't known here, or there twice", r.GetApiVersion(), r.GetKind())
		}
		if wrong, err := json.UnmarshalStrict(text, object); err != nil || len(wrong) > 0 {
			t.Fatalf("%s: %v, %v\n%s", r.GetKind(), err, wrong, text)
		}
		objects[r.GetKind()] = object
	}
	return objects
}

func TestBase(t *testing.T) {
	objects := build(t, "base")
	deployment := get[*appsv1.Deployment](t, objects)
	template := deployment.Spec.Template
	checkPod(t, objects, template)
	if got := *deployment.Spec.Replicas; got != 2 {
		t.Errorf("%d replicas, want 2", got)
	}
	for what, selector := range map[string]map[string]string{
		"deployment": deployment.Spec.Selector.MatchLabels,
		"budget":     get[*policyv1.PodDisruptionBudget](t, objects).Spec.Selector.MatchLabels,
		"spread":     template.Spec.TopologySpreadConstraints[0].LabelSelector.MatchLabels,
	} {
		if !reflect.DeepEqual(selector, template.Labels) {
			t.Errorf("the %s selects %v, the pods are %v", what, selector, template.Labels)
		}
	}
}

// TestNodeLocal: the overlay is the base with a DaemonSet of the same pod in place of the Deployment.
func TestNodeLocal(t *testing.T) {
	base, overlay := build(t, "base"), build(t, "node-local")
	for _, kind := range []string{"Deployment", "PodDisruptionBudget"} {
		if overlay[kind] != nil {
			t.Errorf("the overlay has a %s", kind)
		}
	}
	set := get[*appsv1.DaemonSet](t, overlay)
	checkPod(t, overlay, set.Spec.Template)
	if !reflect.DeepEqual(set.Spec.Selector.MatchLabels, set.Spec.Template.Labels) {
		t.Errorf("it selects %v, its pods are %v", set.Spec.Selector.MatchLabels, set.Spec.Template.Labels)
	}
	want := get[*appsv1.Deployment](t, base).Spec.Template
	want.Spec.TopologySpreadConstraints = nil
	want.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	want.Spec.PriorityClassName = "system-node-critical"
	if !reflect.DeepEqual(set.Spec.Template, want) {
		t.Errorf("the pod is\n%+v\nthe Deployment's\n%+v", set.Spec.Template, want)
	}
	if policy := get[*corev1.Service](t, overlay).Spec.InternalTrafficPolicy; policy == nil || *policy != corev1.ServiceInternalTrafficPolicyLocal {
		t.Error("the service isn't local to the node")
	}
}

// TestMonitoring: the alerts and the dashboard are those of examples/monitoring, for the pods of the base.
func TestMonitoring(t *testing.T) {
	objects := build(t, "monitoring")
	examples := filepath.Join("..", "..", "examples", "monitoring")
	read := func(name string) []byte {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(examples, name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var want monitoringv1.PrometheusRuleSpec
	if err := yaml.Unmarshal(read("rules.yml"), &want); err != nil {
		t.Fatal(err)
	}
	if got := get[*monitoringv1.PrometheusRule](t, objects).Spec; len(got.Groups) == 0 || !reflect.DeepEqual(got, want) {
		t.Error("other rules than examples/monitoring/rules.yml: make manifests")
	}
	if get[*corev1.ConfigMap](t, objects).Data["dashboard.json"] != string(read("dashboard.json")) {
		t.Error("another dashboard than examples/monitoring/dashboard.json: make manifests")
	}
	pod := get[*appsv1.Deployment](t, build(t, "base")).Spec.Template
	monitor := get[*monitoringv1.PodMonitor](t, objects).Spec
	if !reflect.DeepEqual(monitor.Selector.MatchLabels, pod.Labels) {
		t.Errorf("it selects %v, the pods are %v", monitor.Selector.MatchLabels, pod.Labels)
	}
	endpoint := monitor.PodMetricsEndpoints[0]
	if port := *endpoint.Port; !slices.ContainsFunc(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == port }) {
		t.Errorf("the pod has no port %s", port)
	}
	job := *endpoint.RelabelConfigs[0].Replacement
	if selector := fmt.Sprintf("{job=%q}", job); endpoint.RelabelConfigs[0].TargetLabel != "job" || !strings.Contains(string(read("rules.yml")), selector) {
		t.Errorf("the alerts don't have the job %s", job)
	}
}

// get returns the only object of type T.
func get[T any](t *testing.T, objects map[string]any) T {
	t.Helper()
	for _, o := range objects {
		if found, ok := o.(T); ok {
			return found
		}
	}
	var none T
	t.Fatalf("no %T", none)
	return none
}

// checkPod checks what the objects say of each other, and the pod's ports against the Corefile.
func checkPod(t *testing.T, objects map[string]any, pod corev1.PodTemplateSpec) {
	t.Helper()
	corefile := get[*corev1.ConfigMap](t, objects).Data["Corefile"]
	container := pod.Spec.Containers[0]
	service := get[*corev1.Service](t, objects)
	if !reflect.DeepEqual(service.Spec.Selector, pod.Labels) {
		t.Errorf("the service selects %v, the pods are %v", service.Spec.Selector, pod.Labels)
	}
	// TestImage in test/ starts it with no more than this.
	least := corev1.SecurityContext{
		AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_BIND_SERVICE"}},
	}
	if got := container.SecurityContext; !reflect.DeepEqual(got, &least) {
		t.Errorf("the container may %+v, want %+v", got, least)
	}
	user := corev1.PodSecurityContext{
		RunAsNonRoot: new(true), RunAsUser: new(int64(65532)), RunAsGroup: new(int64(65532)),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	if got := pod.Spec.SecurityContext; !reflect.DeepEqual(got, &user) {
		t.Errorf("the pod is %+v, want %+v", got, user)
	}
	if got := container.Resources; got.Requests.Cpu().IsZero() || got.Requests.Memory().IsZero() || got.Limits.Memory().IsZero() {
		t.Errorf("it has the resources %+v, want requests and a limit of memory", got)
	}
	ports := map[string]corev1.ContainerPort{}
	for _, p := range container.Ports {
		ports[p.Name] = p
	}
	for _, p := range service.Spec.Ports {
		if at, ok := ports[p.TargetPort.String()]; !ok || at.Protocol != p.Protocol {
			t.Errorf("the service's port %s goes to %s, which the pod doesn't have", p.Name, p.TargetPort.String())
		}
	}
	for _, part := range []string{".:1053 {", "health :8080 {", "ready :8181\n", "prometheus :9153\n"} {
		if !strings.Contains(corefile, part) {
			t.Errorf("the Corefile has no %q", part)
		}
	}
	for what, port := range map[string]int32{
		"dns": ports["dns"].ContainerPort - 1053, "dns-tcp": ports["dns-tcp"].ContainerPort - 1053, "metrics": ports["metrics"].ContainerPort - 9153,
		"liveness":  int32(container.LivenessProbe.HTTPGet.Port.IntValue()) - 8080,
		"readiness": int32(container.ReadinessProbe.HTTPGet.Port.IntValue()) - 8181,
	} {
		if port != 0 {
			t.Errorf("the port of %s isn't the Corefile's", what)
		}
	}
	account, binding := get[*corev1.ServiceAccount](t, objects), get[*rbacv1.ClusterRoleBinding](t, objects)
	if pod.Spec.ServiceAccountName != account.Name || binding.Subjects[0].Name != account.Name || binding.Subjects[0].Namespace != account.Namespace {
		t.Errorf("the pod is %s, the binding %v, the account %s", pod.Spec.ServiceAccountName, binding.Subjects, account.Name)
	}
	if role := get[*rbacv1.ClusterRole](t, objects); binding.RoleRef.Name != role.Name {
		t.Errorf("the binding is for %s, the role is %s", binding.RoleRef.Name, role.Name)
	}
	mounts := map[string]string{}
	for _, m := range container.VolumeMounts {
		mounts[m.Name] = m.MountPath
		if m.SubPath != "" {
			t.Errorf("%s is a subPath, which doesn't follow changes", m.Name)
		}
	}
	for _, v := range pod.Spec.Volumes {
		if mounts[v.Name] == "" {
			t.Errorf("the volume %s isn't mounted", v.Name)
		}
		if v.Name == "kube-dns" && (v.ConfigMap.Optional == nil || !*v.ConfigMap.Optional) {
			t.Error("the ConfigMap kube-dns isn't optional")
		}
	}
	if !strings.Contains(corefile, "config "+mounts["kube-dns"]+"\n") {
		t.Errorf("the Corefile's directory isn't %s", mounts["kube-dns"])
	}
}
