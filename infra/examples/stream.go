// A streamed answer over HTTP that goes on after a cut: go run stream.go [GATEWAY_URL] [QUESTION]
// Nothing but Go's own library.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

type chunk struct {
	Choices []struct {
		Delta struct{ Content string }
	}
	Error *struct{ Code, Message string }
}

// read prints the events of a stream and remembers the last one's id. It says whether [DONE] has come.
// After stopAfter events it gives up, as a network may; 0 means never.
func read(response *http.Response, lastID *string, stopAfter int) bool {
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<24)
	id := ""
	for events := 0; lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		if name == "id" {
			id = value
		} else if name == "data" {
			if value == "[DONE]" {
				return true
			}
			var got chunk
			if err := json.Unmarshal([]byte(value), &got); err != nil {
				panic(err)
			}
			if got.Error != nil {
				panic(got.Error.Code + ": " + got.Error.Message)
			}
			for _, choice := range got.Choices {
				fmt.Print(choice.Delta.Content)
			}
			*lastID = id
			if events++; events == stopAfter {
				return false
			}
		}
	}
	return false
}

func main() {
	url, question := "http://127.0.0.1:8080", "Name the capital of France."
	if len(os.Args) > 1 {
		url = os.Args[1]
	}
	if len(os.Args) > 2 {
		question = os.Args[2]
	}
	body, _ := json.Marshal(map[string]any{
		"model": "smollm2-135m-instruct", "stream": true, "temperature": 0,
		"messages": []map[string]string{{"role": "user", "content": question}},
	})
	response, err := http.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil || response.StatusCode != 200 {
		panic(fmt.Sprint("no answer: ", err, response))
	}
	place, lastID := response.Header.Get("Content-Location"), ""
	done := read(response, &lastID, 4) // cut on purpose, to show what follows
	for tries := 0; !done && tries < 10; tries++ {
		request, _ := http.NewRequest("GET", url+place, nil)
		request.Header.Set("Last-Event-ID", lastID)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			time.Sleep(time.Second)
			continue
		}
		if response.StatusCode != 200 {
			panic(response.Status)
		}
		done = read(response, &lastID, 0)
	}
	fmt.Println()
}
