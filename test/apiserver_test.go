package test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
)

type object = map[string]any

// apiServer plays the API server of a cluster with one service, web in the namespace shop at 192.0.2.100, and returns its
// URL. It answers a list, and a watch that begins with what there is.
func apiServer(t *testing.T) string {
	t.Helper()
	mux := http.NewServeMux()
	serve := func(path, version, kind string, item object) {
		item["apiVersion"], item["kind"] = version, kind
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			out := json.NewEncoder(w)
			if r.FormValue("watch") == "" {
				_ = out.Encode(object{"apiVersion": version, "kind": kind + "List", "metadata": object{"resourceVersion": "1"}, "items": []object{item}})
				return
			}
			if r.FormValue("sendInitialEvents") == "true" {
				end := object{"resourceVersion": "1", "annotations": object{"k8s.io/initial-events-end": "true"}}
				_ = out.Encode(object{"type": "ADDED", "object": item})
				_ = out.Encode(object{"type": "BOOKMARK", "object": object{"apiVersion": version, "kind": kind, "metadata": end}})
			}
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done() // nothing changes
		})
	}
	serve("/api/v1/namespaces", "v1", "Namespace", object{"metadata": object{"name": "shop", "resourceVersion": "1"}})
	serve("/api/v1/services", "v1", "Service", object{
		"metadata": object{"name": "web", "namespace": "shop", "resourceVersion": "1"},
		"spec":     object{"clusterIP": "192.0.2.100", "clusterIPs": []string{"192.0.2.100"}, "type": "ClusterIP", "ports": []object{{"port": 80, "protocol": "TCP"}}},
	})
	serve("/apis/discovery.k8s.io/v1/endpointslices", "discovery.k8s.io/v1", "EndpointSlice", object{
		"metadata":    object{"name": "web-1", "namespace": "shop", "resourceVersion": "1", "labels": object{"kubernetes.io/service-name": "web"}},
		"addressType": "IPv4", "endpoints": []object{{"addresses": []string{"192.0.2.101"}}}, "ports": []object{{"port": 80, "protocol": "TCP"}},
	})
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}
