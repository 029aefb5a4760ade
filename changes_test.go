package nanny

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
)

func TestChanges(t *testing.T) {
	const kept = "server=/kept.example/192.0.2.9\nserver=/both.example/192.0.2.1\n"
	var many strings.Builder
	for i := range 8 {
		fmt.Fprintf(&many, "address=/n%d.example/192.0.2.1\n", i)
	}
	tests := []struct {
		name     string
		old, new map[string]string // files of the directory
		want     string
	}{
		{"a hosts file", map[string]string{"a.hosts": "192.0.2.1 a\n"}, map[string]string{"a.hosts": "192.0.2.2 a\n"}, "files=~a.hosts"},
		{"a domain and its server", map[string]string{"k.conf": kept},
			map[string]string{"k.conf": kept, "b.conf": "server=/b.example/c.example/192.0.2.1#5353\n"},
			`files=+b.conf domains="+b.example,+c.example" servers="+192.0.2.1#5353"`},
		{"a domain goes, its server is another's too", map[string]string{"k.conf": kept, "b.conf": "server=/b.example/192.0.2.9\n"},
			map[string]string{"k.conf": kept}, `files=-b.conf domains="-b.example"`},
		{"a domain that another file has too", map[string]string{"k.conf": kept, "b.conf": "server=/both.example/192.0.2.9\n"},
			map[string]string{"k.conf": kept}, `files=-b.conf`},
		{"a domain moves", map[string]string{"a.conf": "local=/a.example/\n"}, map[string]string{"b.conf": "local=/a.example/\n"},
			"files=-a.conf,+b.conf"},
		{"another server", map[string]string{"a.conf": "server=/a.example/192.0.2.1\nserver=192.0.2.3"},
			map[string]string{"a.conf": "server=/a.example/192.0.2.2\nserver=192.0.2.3"}, `files=~a.conf servers="-192.0.2.1,+192.0.2.2"`},
		{"many", nil, map[string]string{"a.conf": many.String()},
			`files=+a.conf domains="+n0.example,+n1.example,+n2.example,+n3.example,+n4.example,and 3 more"`},
		{"addresses of a name", map[string]string{"stubDomains": "{}"}, map[string]string{"stubDomains": "{}"}, "files=addresses"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := testConfig(tt.old).changes(testConfig(tt.new)); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// testConfig is a config of files as far as changes looks at it.
func testConfig(files map[string]string) *config {
	c := &config{sources: map[string][sha256.Size]byte{}, files: texts{}}
	for name, text := range files {
		c.sources[name] = sha256.Sum256([]byte(text))
		dir := confDir
		if strings.HasSuffix(name, ".hosts") {
			dir = hostsDir
		}
		c.files.set(dir+"/"+name, []byte(text))
	}
	return c
}
