package kubernetes

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// kubeDNS is the Service of a cluster with kube-dns, as far as the page on the way from it is about it.
const kubeDNS = `apiVersion: v1
kind: Service
metadata:
  name: kube-dns
  namespace: kube-system
spec:
  clusterIP: 10.96.0.10
  selector:
    k8s-app: kube-dns
  ports:
  - {name: dns, port: 53, protocol: UDP, targetPort: 53}
  - {name: dns-tcp, port: 53, protocol: TCP, targetPort: 53}
`

// TestMigration: the page's two patches of the Service lead to the pods of the base, and back.
func TestMigration(t *testing.T) {
	page, err := os.ReadFile("../../docs/migration.md")
	if err != nil {
		t.Fatal(err)
	}
	patches := regexp.MustCompile(`(?s)patch service kube-dns --type json -p '(.*?)'`).FindAllStringSubmatch(string(page), -1)
	if len(patches) != 2 {
		t.Fatalf("the page has %d patches, want 2", len(patches))
	}
	patched := func(patches ...string) *corev1.Service {
		t.Helper()
		kustomization := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [service.yaml]\npatches:\n"
		for _, p := range patches {
			kustomization += fmt.Sprintf("- target: {kind: Service}\n  patch: %q\n", p)
		}
		fs := filesys.MakeFsInMemory()
		for name, text := range map[string]string{"service.yaml": kubeDNS, "kustomization.yaml": kustomization} {
			if err := fs.WriteFile("/"+name, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		return get[*corev1.Service](t, buildIn(t, fs, "/"))
	}

	there := patched(strings.TrimSpace(patches[0][1]))
	pod := get[*appsv1.Deployment](t, build(t, "base")).Spec.Template
	if !reflect.DeepEqual(there.Spec.Selector, pod.Labels) {
		t.Errorf("it selects %v, the pods are %v", there.Spec.Selector, pod.Labels)
	}
	if len(there.Spec.Ports) != 2 {
		t.Errorf("it has %d ports, want 2", len(there.Spec.Ports))
	}
	for _, p := range there.Spec.Ports {
		listens := false
		for _, c := range pod.Spec.Containers[0].Ports {
			listens = listens || c.ContainerPort == int32(p.TargetPort.IntValue()) && c.Protocol == p.Protocol
		}
		if !listens || p.Port != 53 {
			t.Errorf("port %d %s goes to %s, which the pod doesn't have", p.Port, p.Protocol, p.TargetPort.String())
		}
	}
	if got, want := patched(patches[0][1], patches[1][1]), patched(); !reflect.DeepEqual(got, want) {
		t.Errorf("the way back leads to\n%+v, want\n%+v", got.Spec, want.Spec)
	}
}
