package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// window is what $__rate_interval stands for: as in Grafana, a step and what lies between two scrapes.
const window = 5 * time.Second

const (
	lineStep = 2 * time.Second
	barStep  = 4 * time.Second
)

// panel is a panel of the dashboard, as far as it is drawn.
type panel struct {
	Title   string
	Targets []struct{ Expr, LegendFormat string }

	FieldConfig struct {
		Defaults struct {
			Unit   string
			Max    *float64
			Custom struct {
				DrawStyle string
				Stacking  struct{ Mode string }
			}
		}
	}
	series []series
}

// series has a point for each step; NaN where there is none.
type series struct {
	name   string
	points []float64
}

func (p *panel) bars() bool    { return p.FieldConfig.Defaults.Custom.DrawStyle == "bars" }
func (p *panel) stacked() bool { return p.FieldConfig.Defaults.Custom.Stacking.Mode == "normal" }

func (p *panel) step() time.Duration {
	if p.bars() {
		return barStep
	}
	return lineStep
}

// readPanels returns the panels of the dashboard at path that are in titles.
func readPanels(path string) ([]panel, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var dashboard struct{ Panels []panel }
	if err := json.Unmarshal(data, &dashboard); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	panels := make([]panel, 0, len(titles))
	for _, title := range titles {
		i := slices.IndexFunc(dashboard.Panels, func(p panel) bool { return p.Title == title })
		if i < 0 {
			return nil, fmt.Errorf("%s has no panel %q", path, title)
		}
		panels = append(panels, dashboard.Panels[i])
	}
	return panels, nil
}

// prom is a running Prometheus.
type prom struct {
	ctx context.Context
	url string
}

var label = regexp.MustCompile(`\{\{(\w+)\}\}`)

// fill asks p for the series of a panel.
func (p prom) fill(panel *panel, begin time.Time, length time.Duration) error {
	variables := strings.NewReplacer("$__rate_interval", window.String(), "$instance", ".+", "$zones", ".+")
	for _, target := range panel.Targets {
		matrix, err := p.queryRange(variables.Replace(target.Expr), begin, length, panel.step())
		if err != nil {
			return fmt.Errorf("%s: %w", panel.Title, err)
		}
		for _, m := range matrix {
			s := series{points: make([]float64, int(length/panel.step())+1)}
			s.name = label.ReplaceAllStringFunc(target.LegendFormat, func(l string) string { return m.Metric[strings.Trim(l, "{}")] })
			for i := range s.points {
				s.points[i] = math.NaN()
			}
			for _, v := range m.Values {
				at, _ := v[0].(float64)
				text, _ := v[1].(string)
				i := int(math.Round((at - float64(begin.UnixMilli())/1000) / panel.step().Seconds()))
				if f, err := strconv.ParseFloat(text, 64); err == nil && i >= 0 && i < len(s.points) {
					s.points[i] = f
				}
			}
			panel.series = append(panel.series, s)
		}
	}
	nothing := func(s series) bool {
		return !slices.ContainsFunc(s.points, func(f float64) bool { return f > 0 })
	}
	panel.series = slices.DeleteFunc(panel.series, nothing)
	if len(panel.series) == 0 {
		return fmt.Errorf("%s: Prometheus has nothing for it", panel.Title)
	}
	return nil
}

type matrix []struct {
	Metric map[string]string
	Values [][2]any // time and value, the latter in quotes
}

func (p prom) queryRange(query string, begin time.Time, length, step time.Duration) (matrix, error) {
	seconds := func(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }
	args := url.Values{
		"query": {query}, "start": {seconds(begin)}, "end": {seconds(begin.Add(length))},
		"step": {strconv.FormatFloat(step.Seconds(), 'f', -1, 64)},
	}
	req, err := http.NewRequestWithContext(p.ctx, http.MethodGet, p.url+"/api/v1/query_range?"+args.Encode(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", resp.Status, body)
	}
	var answer struct {
		Data struct{ Result matrix }
	}
	err = json.Unmarshal(body, &answer)
	return answer.Data.Result, err
}
