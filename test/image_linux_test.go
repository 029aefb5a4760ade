package test

import (
	"os"
	"os/exec"
	"testing"
)

// TestImage: what the Dockerfile makes starts in a container as deploy/kubernetes describes it.
func TestImage(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can make a container")
	}
	out, err := exec.Command("../scripts/imagetest.sh", program()).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}
