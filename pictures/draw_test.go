package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"
)

// wellFormed fails the test unless text is XML, small, and has each title.
func wellFormed(t *testing.T, text []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(text))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if len(text) > 60<<10 {
		t.Errorf("%d bytes", len(text))
	}
	for _, title := range titles {
		if !strings.Contains(string(text), ">"+title+"<") {
			t.Errorf("%q isn't in it", title)
		}
	}
}

func TestDraw(t *testing.T) {
	panels, err := readPanels("../examples/monitoring/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	length := 2 * time.Minute
	for i := range panels {
		p := &panels[i]
		for _, target := range p.Targets {
			s := series{name: target.LegendFormat + "<&", points: make([]float64, int(length/p.step())+1)}
			for j := range s.points {
				s.points[j] = float64(j%7) / 10
			}
			s.points[3] = math.NaN()
			p.series = append(p.series, s)
		}
	}
	text := draw(panels, []event{{time.Second, "change"}, {length, "kill"}}, length)
	wellFormed(t, text)
	if bytes.Contains(text, []byte("NaN")) || bytes.Contains(text, []byte("Inf")) {
		t.Error("a coordinate isn't a number")
	}
}

// TestPicture: the picture in docs is one of these panels.
func TestPicture(t *testing.T) {
	text, err := os.ReadFile("../docs/monitoring.svg")
	if err != nil {
		t.Fatal(err)
	}
	wellFormed(t, text)
}

func TestScale(t *testing.T) {
	for _, test := range []struct{ highest, limit, tick float64 }{
		{1, 1, 0.2}, {1.25, 1.5, 0.5}, {4.3, 5, 1}, {183, 200, 50}, {0.054, 0.06, 0.02}, {9.9, 10, 2},
	} {
		limit, tick := scale(test.highest, nil)
		if math.Abs(limit-test.limit) > 1e-9 || math.Abs(tick-test.tick) > 1e-9 {
			t.Errorf("%v: got %v by %v, want %v by %v", test.highest, limit, tick, test.limit, test.tick)
		}
	}
}
