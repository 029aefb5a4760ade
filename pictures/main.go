// Command pictures draws the main panels of the dashboard in examples/monitoring, as SVG.
//
// It needs bin/coredns, dnsmasq and prometheus. CoreDNS with nanny is asked for two minutes, while its directory is
// changed, rightly and wrongly, and its dnsmasq is killed; Prometheus scrapes it each second. What is drawn are the answers to
// the dashboard's own queries. All of it listens on 127.0.0.1 and ends with this program.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

var (
	coredns    = flag.String("coredns", "bin/coredns", "the CoreDNS to run")
	prometheus = flag.String("prometheus", "prometheus", "the Prometheus to run")
	dashboard  = flag.String("dashboard", "examples/monitoring/dashboard.json", "the dashboard whose panels are drawn")
	output     = flag.String("o", "docs/monitoring.svg", "the file to write")
	length     = flag.Duration("time", 2*time.Minute, "how long CoreDNS is asked")
)

// titles are the panels that are drawn.
var titles = []string{
	"Queries by response code", "Latency",
	"Answered by dnsmasq itself", "Held, sent again, refused",
	"Changes of the directory", "Starts and unexpected ends",
}

// cacheSize is less than the names that are asked for, so that some leave the cache before their time.
const cacheSize = 150

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx); err != nil {
		stop()
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	panels, err := readPanels(*dashboard)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "pictures-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // dnsmasq may be another user
		return err
	}
	upstream, stop, err := startUpstream()
	if err != nil {
		return err
	}
	defer stop()

	// Also when an error ends this function, the processes have ended before their files are removed.
	ctx, cancel := context.WithCancelCause(ctx)
	var processes sync.WaitGroup
	defer processes.Wait()
	defer cancel(nil)
	start := func(name string, args ...string) (pid int, err error) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = 10 * time.Second
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		cmd.Env = append(os.Environ(), "TMPDIR="+dir)
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		processes.Go(func() {
			_ = cmd.Wait()
			cancel(fmt.Errorf("%s has ended: %s", name, cmd.ProcessState))
		})
		return cmd.Process.Pid, nil
	}

	conf := filepath.Join(dir, "conf")
	if err := os.Mkdir(conf, 0o755); err != nil {
		return err
	}
	scene := &scene{dir: conf}
	if err := scene.write("names.hosts", scene.hosts()); err != nil {
		return err
	}
	port, metrics, api := freePort(), freePort(), freePort()
	corefile := fmt.Sprintf(".:%d {\nbind 127.0.0.1\nprometheus 127.0.0.1:%d\nnanny {\nconfig %s\n"+
		"args --no-resolv --no-hosts \"--server=%s\" --cache-size=%d\n}\n}\n", port, metrics, conf, strings.ReplaceAll(upstream, ":", "#"), cacheSize)
	scrape := fmt.Sprintf("global:\n  scrape_interval: 1s\nscrape_configs:\n- job_name: coredns\n  static_configs:\n  - targets: ['127.0.0.1:%d']\n", metrics)
	for name, text := range map[string]string{"Corefile": corefile, "prometheus.yml": scrape} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if scene.coredns, err = start(*coredns, "-quiet", "-conf", filepath.Join(dir, "Corefile")); err != nil {
		return err
	}
	if _, err = start(*prometheus, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address=127.0.0.1:"+strconv.Itoa(api), "--log.level=error"); err != nil {
		return err
	}
	server := prom{ctx, "http://127.0.0.1:" + strconv.Itoa(api)}
	if err := server.await(); err != nil {
		return err
	}

	// Two windows of the rates before the picture begins.
	lead := 2 * window
	answered := make(chan int)
	loadCtx, stopLoad := context.WithTimeout(ctx, lead+*length+time.Second)
	defer stopLoad()
	go func() { answered <- ask(loadCtx, fmt.Sprintf("127.0.0.1:%d", port)) }()
	if err := sleep(ctx, lead); err != nil {
		return err
	}
	begin := time.Now()
	if err := scene.play(ctx, begin, *length); err != nil {
		return err
	}
	if n := <-answered; n == 0 {
		return errors.New("no query was answered")
	}
	for i := range panels {
		if err := server.fill(&panels[i], begin, *length); err != nil {
			return err
		}
	}
	return os.WriteFile(*output, draw(panels, scene.events, *length), 0o644)
}

// sleep waits for d, or returns why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// await waits until Prometheus answers.
func (p prom) await() error {
	for {
		req, err := http.NewRequestWithContext(p.ctx, http.MethodGet, p.url+"/-/ready", nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		if err := sleep(p.ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}
