package nanny

import (
	"os"
	"slices"
	"testing"
)

// TestRootOnlyByArgs: who can write the directory can't make dnsmasq run as root.
func TestRootOnlyByArgs(t *testing.T) {
	watched, err := findPrivileges([]directive{{"a.conf", 1, "user", "root"}, {"a.conf", 2, "group", "root"}}, 1024)
	if err != nil || len(watched.warnings) != 2 {
		t.Errorf("got %d warnings, error %v; want 2", len(watched.warnings), err)
	}
	if os.Geteuid() != 0 {
		return // the child's user is CoreDNS's anyway
	}
	if !watched.switchUser || watched.uid == 0 {
		t.Errorf("in the directory: got user %d (switched: %t), want another than root", watched.uid, watched.switchUser)
	}
	args, err := findPrivileges([]directive{{argsFile, 1, "user", "root"}, {argsFile, 2, "group", "root"}}, 1024)
	if err != nil || args.switchUser {
		t.Errorf("in args: switched to user %d, error %v; want root", args.uid, err)
	}
}

// A child gets the capabilities that README.md names for its directives, or is missing them, and no other.
func TestCapabilities(t *testing.T) {
	all := []string{"CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_NET_RAW"}
	for text, want := range map[string][]string{
		"address=/a.example/192.0.2.1":              nil,
		"dhcp-range=192.0.2.10,192.0.2.20":          all,
		"dhcp-relay=192.0.2.1,198.51.100.1":         all,
		"enable-ra":                                 all,
		"enable-tftp":                               {"CAP_NET_BIND_SERVICE"},
		"ipset=/a.example/set":                      {"CAP_NET_ADMIN"},
		"nftset=/a.example/4#inet#t#set":            {"CAP_NET_ADMIN"},
		"conntrack":                                 {"CAP_NET_ADMIN"},
		"connmark-allowlist-enable":                 {"CAP_NET_ADMIN"},
		"server=192.0.2.1":                          nil,
		"server=192.0.2.1@eth0":                     {"CAP_NET_RAW"},
		"rev-server=198.51.100.0/24,192.0.2.1":      nil,
		"rev-server=198.51.100.0/24,192.0.2.1@eth0": {"CAP_NET_RAW"},
	} {
		var need []string
		for d := range parseConf("a.conf", []byte(text+"\n")) {
			for _, c := range capabilitiesOf {
				if c.needs(d) {
					need = append(need, c.name)
				}
			}
		}
		if !slices.Equal(need, want) {
			t.Errorf("%s: got %q, want %q", text, need, want)
		}
	}
}
